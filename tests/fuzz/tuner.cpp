#include <cstring>
#include <span>

#include "fuzz_target.h"
#include "tune/group_results.h"
#include "tune/journal.h"

using uniep::fuzz::accepts;
using uniep::fuzz::require;
using uniep::tune::GroupResults;
using uniep::tune::JournalLine;

namespace {

constexpr std::size_t kSlots = 2;

// Of the bytes themselves, so that what follows is looked at.
uint64_t identity_in(std::span<const std::byte> bytes) {
  uint64_t identity = 0;
  if (bytes.size() >= sizeof(uint32_t) + sizeof(identity)) {
    std::memcpy(&identity, bytes.data() + sizeof(uint32_t), sizeof(identity));
  }
  return identity;
}

void read_results(std::span<const std::byte> bytes) {
  const uint64_t identity = identity_in(bytes);
  GroupResults results;
  if (!accepts([&] { results = uniep::tune::parse_results(bytes, identity, kSlots); })) return;
  const std::vector<std::byte> again = uniep::tune::results_bytes(results, identity);
  require(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end()), "the results are written as they were");
}

void read_journal(std::string_view text) {
  const std::vector<JournalLine> lines = uniep::tune::parse_journal(text);
  require(uniep::tune::parse_journal(uniep::tune::to_text(lines)) == lines, "the journal is read as it was");
}

}  // namespace

// What a tuner reads: other groups' results, and the journal of an earlier run.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  read_results({reinterpret_cast<const std::byte*>(data), size});
  read_journal({reinterpret_cast<const char*>(data), size});
  return 0;
}
