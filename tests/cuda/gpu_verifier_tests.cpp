// The verifier on one GPU, four virtual ranks: jobs without a fault raise no alarm; a bit that changes in y, dx, dprobs
// or dW behind the call that made it is found, and its rank named, or among the suspects; a bit of a weight is told
// from weights that an optimizer wrote. Exit status 77 without a Hopper GPU. Usage: gpu_verifier_tests [--steps N]
// [--verbose]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/cuda/verified_job.h"

namespace uniep::cuda::test {
namespace {

void flip_bit(const void* memory, CUstream stream) {
  const ScopedDevice scope(0);
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  uint16_t value = 0;
  check(driver().cuMemcpyDtoHAsync(&value, address, sizeof(value), stream), "reading a value");
  check(driver().cuStreamSynchronize(stream), "reading a value");
  value ^= 1u << 3;
  check(driver().cuMemcpyHtoDAsync(address, &value, sizeof(value), stream), "writing a value");
  check(driver().cuStreamSynchronize(stream), "writing a value");
}

class VerifierTests {
 public:
  VerifierTests(Results& results, int64_t steps) : results_(results), steps_(steps) {}

  void no_false_alarm() {
    for (const char* const schedule : kSchedules) {
      VerifiedJob job(kExperts, schedule, 1);
      std::string alarm;
      for (int64_t step = 0; step < steps_ && alarm.empty(); ++step) {
        job.step();
        for (const Finding& finding : job.end()) alarm = finding.message;
      }
      const VerifierCounts counts = job.verifier().counts();
      const bool checked = counts.forward_checks + counts.backward_checks == steps_;
      results_.record(
          std::string("no false alarm, ") + schedule, alarm.empty() && checked,
          alarm.empty() ? std::to_string(counts.forward_checks + counts.backward_checks) + " checks" : alarm);
    }
  }

  enum class Where { kY, kDx, kDprobs, kDw1, kDw2 };

  // The rank itself, or, where only a sum or a dprob was wrong, it among the suspects.
  void planted(const char* name, Where where) {
    const bool forward = where == Where::kY;
    const bool gradient = where == Where::kDw1 || where == Where::kDw2;
    for (int rank = 0; rank < kRanks; ++rank) {
      // One expert a rank: it is the one whose gradients are compared.
      VerifiedJob job(gradient ? kRanks : kExperts, kSchedules[rank], static_cast<uint64_t>(rank) + 1);
      if (!forward) {
        job.step();
        if (!job.end().empty()) results_.record(name, false, "an alarm before the fault");
      }
      const auto index = static_cast<std::size_t>(rank);
      const CUstream stream = job.layer(rank).stream();
      job.step(
          [&](const std::vector<ForwardArguments>& calls) {
            if (forward) flip_bit(calls[index].y + 77, stream);
          },
          [&](const std::vector<BackwardArguments>& calls) {
            if (where == Where::kDx) flip_bit(calls[index].dx + 77, stream);
            if (where == Where::kDprobs) flip_bit(calls[index].dprobs + 5, stream);
            if (where == Where::kDw1) flip_bit(static_cast<const BFloat16*>(calls[index].gradients.dw1) + 77, stream);
            if (where == Where::kDw2) flip_bit(static_cast<const BFloat16*>(calls[index].gradients.dw2) + 77, stream);
          });
      const std::vector<Finding> findings = job.end();
      const bool one = findings.size() == 1;
      const Finding finding = one ? findings.front() : Finding{};
      const bool named = finding.kind == FindingKind::kWrongRank && finding.rank == rank;
      const bool suspected =
          !gradient && finding.kind == FindingKind::kUndecided &&
          std::find(finding.suspects.begin(), finding.suspects.end(), rank) != finding.suspects.end();
      named_ += named;
      undecided_ += suspected;
      results_.record(std::string(name) + " of rank " + std::to_string(rank), one && (named || suspected),
                      one ? finding.message : std::to_string(findings.size()) + " findings");
    }
  }

  void memory_that_changed() {
    {
      VerifiedJob job(kExperts, kSchedules[0], 1);
      job.step();
      flip_bit(job.layer(2).arguments().weights.w1 + 5, job.layer(2).stream());
      expect("a weight that changed", job.end(), FindingKind::kChangedMemory, 2);
    }
    {
      VerifiedJob job(kExperts, kSchedules[0], 1);
      job.step();
      const SmallLayer& layer = job.layer(1);
      const ScopedDevice scope(0);
      const int64_t bytes = kExperts / kRanks * layer.shape().intermediate * layer.shape().hidden * 2;
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(layer.arguments().weights.w2), 0x3c,
                                     static_cast<std::size_t>(bytes), layer.stream()),
            "an optimizer's step");
      check(driver().cuStreamSynchronize(layer.stream()), "an optimizer's step");
      expect("weights that were written", job.end(), FindingKind::kChangedInputs, -1);
    }
  }

  void print() const {
    std::printf("planted bits: rank named %d times, among the suspects %d times\n", named_, undecided_);
  }

 private:
  void expect(const char* name, const std::vector<Finding>& findings, FindingKind kind, int rank) {
    const bool right = findings.size() == 1 && findings[0].kind == kind && findings[0].rank == rank;
    results_.record(name, right,
                    findings.size() == 1 ? findings[0].message : std::to_string(findings.size()) + " findings");
  }

  Results& results_;
  int64_t steps_;
  int named_ = 0, undecided_ = 0;
};

int run(int argc, char** argv) {
  Results results;
  int64_t steps = 40;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    results.verbose |= argument == "--verbose";
    if (argument == "--steps" && i + 1 < argc) steps = std::strtoll(argv[++i], nullptr, 10);
  }
  VerifierTests tests(results, steps);
  using Where = VerifierTests::Where;
  tests.no_false_alarm();
  tests.planted("a tile of y", Where::kY);
  tests.planted("a tile of dx", Where::kDx);
  tests.planted("a dprob", Where::kDprobs);
  tests.planted("a tile of dW1", Where::kDw1);
  tests.planted("a tile of dW2", Where::kDw2);
  tests.memory_that_changed();
  tests.print();
  std::printf("verifier tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
