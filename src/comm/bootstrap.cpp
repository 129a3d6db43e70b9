#include "comm/bootstrap.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "comm/name_hash.h"
#include "io/descriptor.h"

namespace uniep {
namespace {

constexpr int kMaxRanks = 1 << 20;
constexpr int kLastPort = 65535;
constexpr std::string_view kIdMagic = "UniEP unique id\n";

struct UniqueId {
  std::array<char, kIdMagic.size()> magic;
  std::array<unsigned char, 16> random;
  std::array<uint64_t, 2> host;
  std::array<char, 80> unused;
};
static_assert(sizeof(UniqueId) == kUniqueIdBytes);

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

std::string text_of(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr ? text : "";
}

// Equal for the processes of one host since it was started. Zero where the system does not tell.
std::array<uint64_t, 2> this_host() {
  const Descriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  std::array<char, 64> text{};
  const ssize_t size = file ? ::read(file.number(), text.data(), text.size()) : -1;
  if (size <= 0) return {};
  return name_hash(std::string_view(text.data(), static_cast<std::size_t>(size)));
}

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  if (std::getenv("RANK") == nullptr && std::getenv("WORLD_SIZE") == nullptr) return std::nullopt;
  RankEnvironment environment;
  environment.ranks = integer_of("WORLD_SIZE", 1, kMaxRanks);
  environment.rank = integer_of("RANK", 0, environment.ranks - 1);
  environment.local_rank = integer_of("LOCAL_RANK", 0, environment.ranks - 1);
  if (std::getenv("LOCAL_WORLD_SIZE") != nullptr) {
    const int local = integer_of("LOCAL_WORLD_SIZE", 1, environment.ranks);
    if (local < environment.ranks) {
      throw Error(Status::kUnsupported, "WORLD_SIZE: " + std::to_string(environment.ranks) + " with LOCAL_WORLD_SIZE " +
                                            std::to_string(local) +
                                            "; a group's ranks must be processes of one host, so a job on several "
                                            "hosts must give each group a unique id or a communicator");
    }
  }
  const int port = integer_of("MASTER_PORT", 1, kLastPort);
  environment.name = "torchrun " + text_of("MASTER_ADDR") + " " + std::to_string(port) + " " +
                     text_of("TORCHELASTIC_RUN_ID") + " " + std::to_string(::geteuid());
  return environment;
}

RankEnvironment required_rank_environment() {
  std::optional<RankEnvironment> environment = rank_environment();
  if (!environment) {
    throw Error(
        Status::kInvalidArgument,
        "RANK, WORLD_SIZE: not set; a process a rank needs torchrun's environment, a unique id or a communicator");
  }
  return *environment;
}

std::string new_unique_id() {
  UniqueId id{};
  std::copy(kIdMagic.begin(), kIdMagic.end(), id.magic.begin());
  id.host = this_host();
  for (std::size_t done = 0; done < id.random.size();) {
    const ssize_t size = ::getrandom(id.random.data() + done, id.random.size() - done, 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) throw Error(Status::kDevice, std::string("making a unique id: getrandom: ") + std::strerror(errno));
    done += static_cast<std::size_t>(size);
  }
  return {reinterpret_cast<const char*>(&id), sizeof(id)};
}

std::string name_of_unique_id(const std::string& id) {
  if (id.size() != kUniqueIdBytes) {
    throw Error(Status::kInvalidArgument, "bootstrap: a unique id of " + std::to_string(id.size()) +
                                              " bytes; make_unique_id() gives " + std::to_string(kUniqueIdBytes));
  }
  UniqueId given{};
  std::memcpy(&given, id.data(), sizeof(given));
  const bool ours = std::string_view(given.magic.data(), given.magic.size()) == kIdMagic;
  const std::array<uint64_t, 2> unknown{}, here = this_host();
  if (ours && given.host != here && given.host != unknown && here != unknown) {
    throw Error(Status::kUnsupported,
                "bootstrap: the unique id was made on another host; all ranks must be processes of one host");
  }
  return "unique id " + id;
}

}  // namespace uniep
