#include "cli/memory_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "uniep/error.h"

namespace uniep::cli {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

double machine_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (double kibibytes = 0; file >> name >> kibibytes; std::getline(file, unit)) {
    if (name == "MemAvailable:") return kibibytes * 1024;
  }
  return kUnlimited;
}

}  // namespace

double control_group_bytes(const std::filesystem::path& folder) {
  double limit = 0, used = 0;
  std::ifstream limit_file(folder / "memory.max"), used_file(folder / "memory.current");
  if (!(limit_file >> limit)) return kUnlimited;  // "max", or no such file
  used_file >> used;
  std::ifstream statistics(folder / "memory.stat");
  std::string name;
  for (double bytes = 0; statistics >> name >> bytes;) {
    if (name == "active_file" || name == "inactive_file") used -= bytes;
  }
  return std::clamp(limit - used, 0.0, limit);
}

double available_memory_bytes() {
  return std::min(machine_bytes(), control_group_bytes("/sys/fs/cgroup"));
}

void require_memory(double bytes, std::string_view what) {
  const double available = available_memory_bytes();
  if (bytes <= available) return;
  throw Error(
      Status::kOutOfMemory,
      fmt::format("out of memory: {} need {:.1f} GiB and {:.1f} GiB are available; ask for fewer tokens, experts "
                  "or columns",
                  what, bytes / kGiB, available / kGiB));
}

}  // namespace uniep::cli
