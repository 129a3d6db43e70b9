#include "api/machine_name.h"

#include <fmt/format.h>

#include <thread>

#include "engine/cpu/kernels.h"
#include "engine/cuda/calls/engine.h"
#include "uniep/libraries.h"

namespace uniep::api {

std::string machine_name(const Group& group) {
  std::string device;
  if (group.engine() == EngineKind::kCuda) {
    const int number = group.device(group.first_local_rank());
    const std::string speed = cuda::speed_label(number);
    device = cuda::device_label(number) + (speed.empty() ? "" : ", " + speed);
  } else {
    device = fmt::format("cpu {}, {} cores", cpu::instruction_set_name(cpu::best_instruction_set()),
                         std::thread::hardware_concurrency());
  }
  const char* const launch = group.local_ranks() == group.ranks() ? "threads" : "processes";
  return fmt::format("{}, {} workers, {}, {}", device, group.workers(), launch, library_label());
}

}  // namespace uniep::api
