// Dispatch and combine on all SMs but a few, a GPU a rank, while NCCL all-reduces on other streams of the same GPUs
// without end: nothing may wait for ever, and every byte must be right. Exit status 77 without two GPUs or NCCL.
// Usage: gpu_coexistence_tests [--verbose] [--calls N]
#include <cstdlib>

#include "tests/cuda/all_reduces.h"
#include "tests/cuda/group_exchange.h"

namespace uniep::cuda::test {
namespace {

int run(int argc, char** argv) {
  Results results;
  int calls = 300;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    if (std::strcmp(argv[i], "--calls") == 0 && i + 1 < argc) calls = std::atoi(argv[++i]);
  }
  limit_all_reduces();
  std::vector<int> devices;
  for (int ranks = 2; ranks <= device_count(); ranks *= 2) {
    for (auto device = static_cast<int>(devices.size()); device < ranks; ++device) devices.push_back(device);
  }
  try {
    nccl_caller();
  } catch (const Error& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  if (devices.empty()) {
    std::printf("skipped: all-reduces need two GPUs\n");
    return 77;
  }
  GroupExchange::Options options;
  options.schedule.set("comm.reserve_sms", kSmsForAllReduces);
  const std::vector<int64_t> tokens(devices.size(), 1024);
  GroupExchange exchange(tokens, devices, {.hidden = 4096, .intermediate = 1536, .experts = 64, .topk = 8}, options);
  exchange.call();  // loads the kernels, which is not for when others' are running
  std::string wrong = exchange.difference();
  AllReduces all_reduces(devices);
  for (int i = 0; i < calls && wrong.empty(); ++i) {
    const bool compared = i % 100 == 0 || i + 1 == calls;
    if (compared) exchange.poison_results();
    exchange.call();
    if (compared) wrong = exchange.difference();
  }
  results.record(std::to_string(calls) + " exchanges", wrong.empty(), wrong);
  const int64_t done = all_reduces.stop();
  results.record(std::to_string(done) + " all-reduces beside them", done > 1);
  std::printf("coexistence tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
