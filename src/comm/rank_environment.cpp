#include "comm/rank_environment.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "uniep/error.h"

namespace uniep {
namespace {

constexpr int kMostRanks = 1 << 20;
constexpr int kLastPort = 65535;

int integer_of(const char* name, int minimum, int maximum) {
  const char* const text = std::getenv(name);
  const std::string legal = "a whole number from " + std::to_string(minimum) + " to " + std::to_string(maximum);
  if (text == nullptr) {
    throw Error(Status::kInvalidArgument, std::string(name) +
                                              ": not set, and RANK or WORLD_SIZE says that this process is one of "
                                              "several ranks; must be " +
                                              legal);
  }
  const std::string_view digits = text;
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || value < minimum || value > maximum) {
    throw Error(Status::kInvalidArgument, std::string(name) + ": '" + text + "'; must be " + legal);
  }
  return value;
}

std::string meeting_place() {
  const char* const given = std::getenv("NCCL_COMM_ID");
  if (given != nullptr && *given != 0) return given;
  const char* const address = std::getenv("MASTER_ADDR");
  const int port = integer_of("MASTER_PORT", 1, kLastPort - 1) + 1;
  return std::string(address != nullptr && *address != 0 ? address : "127.0.0.1") + ":" + std::to_string(port);
}

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  if (std::getenv("RANK") == nullptr && std::getenv("WORLD_SIZE") == nullptr) return std::nullopt;
  RankEnvironment environment;
  environment.ranks = integer_of("WORLD_SIZE", 1, kMostRanks);
  environment.rank = integer_of("RANK", 0, environment.ranks - 1);
  environment.local_rank = integer_of("LOCAL_RANK", 0, environment.ranks - 1);
  environment.id = meeting_place();
  return environment;
}

}  // namespace uniep
