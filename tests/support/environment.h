#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace uniep::test {

// A variable's number, such as UNIEP_TEST_COMBINATIONS (how many random layers); `otherwise` where it is not set.
inline uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Gives an environment variable a value, or none, while it lives.
class ScopedVariable {
 public:
  ScopedVariable(const std::string& name, const std::optional<std::string>& value) : name_(name) {
    const char* const before = std::getenv(name.c_str());
    if (before != nullptr) before_ = before;
    set(value);
  }
  ~ScopedVariable() { set(before_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  void set(const std::optional<std::string>& value) {
    if (value) {
      setenv(name_.c_str(), value->c_str(), 1);
    } else {
      unsetenv(name_.c_str());
    }
  }

  std::string name_;
  std::optional<std::string> before_;
};

using Variables = std::map<std::string, std::string>;

// The variables that tell a process which rank it is, as given; all others of them are not set.
class ScopedRankVariables {
 public:
  explicit ScopedRankVariables(const Variables& given) : values_(given) {}

 private:
  static std::optional<std::string> value_of(const Variables& given, const std::string& name) {
    const auto found = given.find(name);
    return found == given.end() ? std::nullopt : std::optional(found->second);
  }

  struct Values {
    explicit Values(const Variables& given)
        : rank("RANK", value_of(given, "RANK")),
          world_size("WORLD_SIZE", value_of(given, "WORLD_SIZE")),
          local_rank("LOCAL_RANK", value_of(given, "LOCAL_RANK")),
          address("MASTER_ADDR", value_of(given, "MASTER_ADDR")),
          port("MASTER_PORT", value_of(given, "MASTER_PORT")),
          local_size("LOCAL_WORLD_SIZE", value_of(given, "LOCAL_WORLD_SIZE")),
          run("TORCHELASTIC_RUN_ID", value_of(given, "TORCHELASTIC_RUN_ID")),
          id("NCCL_COMM_ID", value_of(given, "NCCL_COMM_ID")) {}
    ScopedVariable rank, world_size, local_rank, address, port, local_size, run, id;
  } values_;
};

}  // namespace uniep::test
