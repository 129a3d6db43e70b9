#include "tune/tuned.h"

#include "fuzz_target.h"

using uniep::fuzz::accepts;
using uniep::fuzz::require;
using uniep::tune::TunedSchedule;

// What is read is written so that it is read as the same.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<TunedSchedule> entries;
  if (!accepts([&] { entries = uniep::tune::parse_tuned(text); })) return 0;
  require(uniep::tune::parse_tuned(uniep::tune::to_json(entries)) == entries, "the JSON is read as the entries");
  return 0;
}
