#include "api/machine_name.h"

#include <fmt/format.h>

#include <thread>

#include "engine/cpu/kernels.h"
#include "engine/cuda/calls/engine.h"
#include "uniep/version.h"

namespace uniep::api {

std::string machine_name(const Group& group) {
  const bool gpu = group.engine() == EngineKind::kCuda;
  const std::string device =
      gpu ? cuda::device_label(group.device(group.first_local_rank())) + ", " +
                cuda::speed_label(group.device(group.first_local_rank()))
          : fmt::format("cpu {}, {} cores", cpu::instruction_set_name(cpu::best_instruction_set()),
                        std::thread::hardware_concurrency());
  const char* const launch = group.local_ranks() == group.ranks() ? "threads" : "processes";
  return fmt::format("{}, {} workers, {}, uniep {}", device, group.workers(), launch, UNIEP_VERSION_STRING);
}

}  // namespace uniep::api
