// The verifier beside kernels that compute wrongly inside, now and then: an SM, a row on its way, a sum. One GPU, four
// virtual ranks; one rank's kernels are wrong, in the job's calls and in the verifier's. It must be found and named, or
// be among those that are, and no other rank may be named. Exit status 77 without a Hopper GPU. Usage:
// gpu_verifier_fault_tests [--verbose] [--fault NAME]
// Each fault runs in a process of its own, which has its kernels compiled; all at once.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "engine/cuda/runtime/kernel_variant.h"
#include "tests/cuda/rank_processes.h"
#include "tests/cuda/verified_job.h"

namespace uniep::cuda::test {
namespace {

struct KernelFault {
  const char* name;
  int rank;  // whose kernels are wrong
  const char* source;
  const char* text;
  const char* replacement;
};

// A fourth of the calls, as their epochs say; of sums, one in 64 of some tokens.
const KernelFault kFaults[] = {
    {"sm", 2, "engine/cuda/device/epilogue/layer_epilogue.h", "rounded_[i] = bias.rounded(d, 2 * i);",
     "rounded_[i] = bias.rounded(d, 2 * i) ^ (i == 0 && shared_.call.program.rank == 2 && blockIdx.x % 8 == 3 &&"
     " (running_call(shared_).epoch * 0x9e3779b1u >> 30) == 0 ? 0x40u : 0u);"},
    {"row", 1, "engine/cuda/device/epilogue/layer_epilogue.h", "rounded_[i] = bias.rounded(d, 2 * i);",
     "rounded_[i] = bias.rounded(d, 2 * i) ^ (i == 0 && shared_.call.program.rank == 1 && blockIdx.x % 4 == 2 &&"
     " math_warp_ == 0 && ptx::lane_index() == 0 && (running_call(shared_).epoch * 0x9e3779b1u >> 30) == 0 ? 0x40u"
     " : 0u);"},
    {"sum", 3, "engine/cuda/device/transfer/reduce.h", "    sum(summands_of(p, expert), call.slot_rows",
     "    uint32_t summands = summands_of(p, expert);\n"
     "    const uint32_t time = __shfl_sync(0xffffffffu, ptx::nanoseconds_low(), 0);\n"
     "    if (p.rank == 3 && token % 32 == 7 && time / 32 % 64 == 0) summands &= summands - 1;\n"
     "    sum(summands, call.slot_rows"},
};

struct Told {
  int named = 0, suspected = 0;
  std::string wrongly;
};

void count(Told& told, const Finding& finding, int culprit) {
  const bool among = std::find(finding.suspects.begin(), finding.suspects.end(), culprit) != finding.suspects.end();
  if (finding.kind == FindingKind::kWrongRank && finding.rank == culprit) {
    ++told.named;
  } else if (finding.kind == FindingKind::kUndecided && among) {
    ++told.suspected;
  } else {
    told.wrongly += (told.wrongly.empty() ? "" : "; ") + finding.message;
  }
}

int run_fault(const KernelFault& fault) {
  constexpr int kSteps = 40;
  set_kernel_variant({.name = std::string("verifier-") + fault.name,
                      .kernels = {"engine/cuda/device/kernels/megakernel.cu"},
                      .edits = {{fault.source, fault.text, fault.replacement}},
                      .options = {}});
  VerifiedJob job(kExperts, kSchedules[3], 1);
  Told told;
  for (int step = 0; step < kSteps; ++step) {
    job.step();
    for (const Finding& finding : job.end()) count(told, finding, fault.rank);
  }
  std::printf("%s: rank %d named %d times, suspected %d times%s%s\n", fault.name, fault.rank, told.named,
              told.suspected, told.wrongly.empty() ? "" : "; FAIL: ", told.wrongly.c_str());
  return told.named + told.suspected > 0 && told.wrongly.empty() ? 0 : 1;
}

int run(int argc, char** argv) {
  Results results;
  for (int i = 1; i < argc; ++i) {
    results.verbose |= std::strcmp(argv[i], "--verbose") == 0;
    if (std::strcmp(argv[i], "--fault") != 0 || i + 1 == argc) continue;
    for (const KernelFault& fault : kFaults) {
      if (std::strcmp(argv[i + 1], fault.name) == 0) return run_fault(fault);
    }
    std::printf("no fault is named '%s'\n", argv[i + 1]);
    return 1;
  }
  std::vector<ChildProcess> children;
  for (const KernelFault& fault : kFaults) children.emplace_back(std::vector<std::string>{"--fault", fault.name});
  for (std::size_t i = 0; i < children.size(); ++i) {
    const bool ended = await(280, [&] { return children[i].has_ended(); });
    results.record(kFaults[i].name, ended && children[i].exit_status() == 0);
  }
  std::printf("verifier fault tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
