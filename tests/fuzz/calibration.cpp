#include "tune/calibration.h"

#include "fuzz_target.h"

using uniep::fuzz::accepts;
using uniep::fuzz::require;
using uniep::tune::Calibration;

// What is read is written so that it is read as the same.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  Calibration calibration;
  if (!accepts([&] { calibration = uniep::tune::parse_calibration(text, "fuzzed.json"); })) return 0;
  const std::string again = uniep::tune::to_json(calibration);
  require(uniep::tune::parse_calibration(again, "again.json") == calibration, "the JSON is read as the calibration");
  return 0;
}
