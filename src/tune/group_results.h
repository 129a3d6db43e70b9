#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tune/search.h"

// What groups of one job tell each other of their measurements, as bytes.
namespace uniep::tune {

// What was measured of a candidate beside an incumbent.
struct Result {
  std::string base, schedule;
  Verdict verdict = Verdict::kInTheRunning;
  std::vector<float> ratios;
  bool operator==(const Result&) const = default;
};

struct GroupResults {
  int group = 0;
  std::vector<std::vector<Result>> slots;  // by layer and direction
  bool operator==(const GroupResults&) const = default;
};

// `identity`: of library, layers and machine.
std::vector<std::byte> results_bytes(const GroupResults& results, uint64_t identity);
// Throws Error(kInvalidArgument) for what is no such bytes, or of another identity or number of slots.
GroupResults parse_results(std::span<const std::byte> bytes, uint64_t identity, std::size_t slots);

}  // namespace uniep::tune
