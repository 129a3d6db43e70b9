// Numbers that a run of the tests is given.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace uniep::test {

// A variable's number, such as UNIEP_TEST_COMBINATIONS (how many random layers); `otherwise` where it is not set.
inline uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace uniep::test
