#include "tune/group_results.h"

#include <fmt/format.h>

#include "model/refuse.h"
#include "tune/bytes.h"

namespace uniep::tune {
namespace {

constexpr uint32_t kResultsFormat = 1;

}  // namespace

std::vector<std::byte> results_bytes(const GroupResults& results, uint64_t identity) {
  ByteWriter writer;
  writer.number(kResultsFormat);
  writer.number(identity);
  writer.number(static_cast<int32_t>(results.group));
  for (const std::vector<Result>& slot : results.slots) {
    writer.number(static_cast<uint32_t>(slot.size()));
    for (const Result& result : slot) {
      writer.text(result.base);
      writer.text(result.schedule);
      writer.number(static_cast<uint8_t>(result.verdict));
      writer.number(static_cast<uint32_t>(result.ratios.size()));
      for (const float ratio : result.ratios) writer.number(ratio);
    }
  }
  return writer.bytes();
}

GroupResults parse_results(std::span<const std::byte> bytes, uint64_t identity, std::size_t slots) {
  ByteReader reader(bytes);
  if (const auto format = reader.number<uint32_t>(); format != kResultsFormat) {
    refuse(fmt::format("format {}; this version reads {}", format, kResultsFormat));
  }
  if (reader.number<uint64_t>() != identity) refuse("of other layers, another machine or another library");
  GroupResults all;
  all.group = reader.number<int32_t>();
  for (std::size_t i = 0; i < slots; ++i) {
    // Entries grow as they are read: a count alone takes no memory.
    std::vector<Result> results;
    const uint32_t count = reader.count(3 * sizeof(uint32_t));
    for (uint32_t k = 0; k < count; ++k) {
      Result result;
      result.base = reader.text();
      result.schedule = reader.text();
      const auto verdict = reader.number<uint8_t>();
      if (verdict > static_cast<uint8_t>(Verdict::kWrong)) refuse(fmt::format("a verdict of {}", verdict));
      result.verdict = static_cast<Verdict>(verdict);
      result.ratios.resize(reader.count(sizeof(float)));
      for (float& ratio : result.ratios) {
        ratio = reader.number<float>();
        if (!(ratio > 0) || !(ratio < 1e6f)) refuse(fmt::format("a ratio of {}", ratio));
      }
      results.push_back(std::move(result));
    }
    all.slots.push_back(std::move(results));
  }
  reader.end();
  return all;
}

}  // namespace uniep::tune
