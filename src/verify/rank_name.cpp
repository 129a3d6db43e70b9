#include "verify/rank_name.h"

#include <fmt/format.h>
#include <unistd.h>

#include "engine/cuda/runtime/nvml.h"

namespace uniep::verify {
std::string rank_name(const Group& group, int rank) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  if (group.engine() != EngineKind::kCuda) return fmt::format("cpu engine, host {}", host);
  const int device = group.device(rank);
  const std::string serial = cuda::gpu_state(device).serial;
  return fmt::format("GPU {}{}{}, host {}", device, serial.empty() ? "" : ", ", serial, host);
}

}  // namespace uniep::verify
