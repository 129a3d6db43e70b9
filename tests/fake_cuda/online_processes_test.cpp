// `uniep bench --op layer --tune online` with a process a rank, on a stand-in for the CUDA driver, on which kernels do
// nothing and launches take as long as the environment says: what ranks decide together, and what one of them alone
// fails with.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fake_cuda/command_ranks.h"

namespace uniep::test {
namespace {

// Sequential execution, whose launches are the most, is the slowest of all Schedules here.
const char* const kSlow = "fusion=none";
// Without these fields the candidates that a tuner begins with are one launch.
const char* const kGiven =
    "queue=dynamic,dispatch.dedup=on,comm.stages=4,order.source_rotation=on,order.raster=8,tile.n=256,tile.stages=4,"
    "tile.cluster=2,combine.column_chunks=1";

class OnlineProcesses : public testing::Test {
 protected:
  Arguments job(int ranks, const char* begin, int steps, int calls = 20) const {
    return {"bench",
            "--op",
            "layer",
            "--tune",
            "online",
            "--engine",
            "cuda",
            "--ranks",
            std::to_string(ranks),
            "--shape",
            "512,512,8,2",
            "--tokens",
            "8192",
            "--launch",
            "processes",
            "--tune-budget",
            "1",
            "--schedule",
            kGiven,
            "--begin",
            begin,
            "--steps",
            std::to_string(steps),
            "--calls",
            std::to_string(calls),
            "--json",
            "-"};
  }
  std::vector<Ended> run(int ranks, const Arguments& arguments, const std::string& plan_of_rank_one = "") {
    return run_ranks(folder_, std::vector<Arguments>(static_cast<std::size_t>(ranks), arguments),
                     [&](std::size_t rank) {
                       ::setenv("FAKE_CUDA_LAUNCH_US", "300", 1);
                       if (rank == 1) ::setenv("FAKE_CUDA_FAIL", plan_of_rank_one.c_str(), 1);
                     });
  }
  // Rank 0's; the others print nothing.
  static nlohmann::json report(const std::vector<Ended>& ended) {
    for (std::size_t rank = 1; rank < ended.size(); ++rank) EXPECT_EQ(ended[rank].printed, "");
    std::string text = ended.front().printed;
    std::replace(text.begin(), text.end(), '|', '\n');
    return nlohmann::json::parse(text, nullptr, false);
  }

  TemporaryFolder folder_;
};

TEST_F(OnlineProcesses, LeaveASlowBeginTogether) {
  for (const int ranks : {2, 4}) {
    std::filesystem::remove_all(folder_ / "cache");
    const std::vector<Ended> ended = run(ranks, job(ranks, kSlow, 20));
    for (const Ended& one : ended) EXPECT_EQ(one.status, "0") << one.said;
    const nlohmann::json found = report(ended);
    EXPECT_EQ(found["calls_compared"], 400);
    EXPECT_EQ(found["calls_differing"], 0);
    EXPECT_EQ(found["ms"].size(), 20u);
    EXPECT_GT(found["tried_calls"], 0);
    EXPECT_EQ(found["begin"]["fusion"], "none");
    EXPECT_NE(found["schedule"]["fusion"], "none") << found["log"];
    EXPECT_LT(found["ms"].back(), found["ms"].front());
  }
}

TEST_F(OnlineProcesses, CountACallOnceWhoseBytesDifferOnAnyRank) {
  const Arguments arguments = job(2, kSlow, 1, 4);
  const std::vector<Ended> ended = run(2, arguments, "checksum:+3:1");
  EXPECT_EQ(ended[0].status, "1");
  expect_said(ended[0], "--tune online: 1 calls have other bytes than sequential execution");
  EXPECT_EQ(ended[1].status, "0") << ended[1].said;
  EXPECT_EQ(report(ended)["calls_differing"], 1);
  const std::vector<Ended> both =
      run_ranks(folder_, {arguments, arguments}, [](std::size_t) { ::setenv("FAKE_CUDA_FAIL", "checksum:+3:1", 1); });
  EXPECT_EQ(both[0].status, "1") << both[0].said;
  EXPECT_EQ(report(both)["calls_differing"], 1);
}

// In its check, which the first calls of one launch are, and in the job.
TEST_F(OnlineProcesses, GoOnWhereACandidateFailsOnOneRank) {
  for (const int call : {1, 2, 6}) {
    std::filesystem::remove_all(folder_ / "cache");
    const std::vector<Ended> ended = run(2, job(2, kSlow, 12), "one launch:+" + std::to_string(call) + ":1");
    for (const Ended& one : ended) EXPECT_EQ(one.status, "0") << one.said;
    const nlohmann::json found = report(ended);
    EXPECT_EQ(found["calls_differing"], 0);
    EXPECT_NE(found["log"].dump().find(": failed: "), std::string::npos) << call << ended[0].said;
  }
}

TEST_F(OnlineProcesses, EndTogetherWhereTheIncumbentFailsOnOneRank) {
  const std::vector<Ended> ended = run(2, job(2, "fusion=layer", 1, 4), "one launch:+2:1");
  for (const Ended& one : ended) {
    EXPECT_EQ(one.status, "1") << one.said;
    expect_said(one, "rank 1: ");
    expect_said(one, "recover() makes the group usable again");
  }
}

TEST_F(OnlineProcesses, EndWhereARankIsGone) {
  const Arguments arguments = job(2, kSlow, 1'000'000);
  std::vector<Process> ranks = start_ranks(folder_, {arguments, arguments});
  ::usleep(1'000'000);
  ranks[1].end();
  const double begin = monotonic_seconds();
  const std::vector<Ended> ended = ends_of(ranks);
  EXPECT_LT(monotonic_seconds() - begin, 10);
  EXPECT_EQ(ended[0].status, "1");
  expect_said(ended[0], "rank 1");
}

TEST_F(OnlineProcesses, OfAnotherJobAreRefused) {
  const std::vector<Ended> ended = run_ranks(folder_, {job(2, kSlow, 2), job(2, kSlow, 3)});
  for (const Ended& one : ended) {
    EXPECT_EQ(one.status, "2") << one.said;
    expect_said(one, "--tune online: rank 1 was given another --tokens, --routing, --seed, --steps");
  }
}

}  // namespace
}  // namespace uniep::test
