// A process a rank: what each is told, and what is said when one of them fails.
#include "cli/rank_launcher.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include "cli/gathered.h"
#include "cli/layer_inputs.h"
#include "engine/cuda/calls/engine.h"
#include "io/file.h"
#include "support/command.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace uniep::test {
namespace {

// Runs a shell script a rank, $0 being `folder`.
void launch_script(const std::string& script, const TemporaryFolder& folder, int ranks) {
  cli::launch_ranks({"/bin/sh", {"-c", script, folder.path()}}, "uniep run", ranks);
}

bool has_children() {
  return waitpid(-1, nullptr, WNOHANG) != -1 || errno != ECHILD;
}

TEST(RankLauncher, EveryRankIsToldWhichItIs) {
  const ScopedRankVariables stale({{"LOCAL_RANK", "7"}, {"MASTER_PORT", "1"}});
  const TemporaryFolder folder;
  launch_script(R"(echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT > "$0/$RANK")", folder, 3);
  std::set<int> ports;
  for (int rank = 0; rank < 3; ++rank) {
    std::istringstream told(io::read_text_file(folder / std::to_string(rank)));
    int own = -1, ranks = -1, local = -1, port = -1;
    std::string address;
    told >> own >> ranks >> local >> address >> port;
    EXPECT_EQ(own, rank);
    EXPECT_EQ(ranks, 3);
    EXPECT_EQ(local, rank);
    EXPECT_EQ(address, "127.0.0.1");
    ports.insert(port);
  }
  EXPECT_EQ(ports.size(), 1U);
  EXPECT_GT(*ports.begin(), 1024);
  EXPECT_FALSE(has_children());
}

TEST(RankLauncher, TheFailureOfOneEndsTheOthers) {
  const TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  // Rank 1 waits until the others are there.
  expect_error(Status::kDevice, "rank 1: out of luck", [&] {
    launch_script(
        R"(echo $$ > "$0/new$RANK"; mv "$0/new$RANK" "$0/$RANK"
           [ $RANK = 1 ] || exec sleep 1000
           while [ ! -e "$0/0" ] || [ ! -e "$0/2" ]; do sleep 0.01; done
           echo chatter >&2; echo "uniep run: out of luck" >&2; exit 1)",
        folder, 3);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_FALSE(has_children());
  for (const char* rank : {"0", "2"}) {
    EXPECT_EQ(kill(std::stoi(io::read_text_file(folder / rank)), 0), -1) << rank;
  }
}

TEST(RankLauncher, WhoIsEndedAsksItsRanksToEnd) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const TemporaryFolder folder;
    if (signal == SIGINT) io::write_file(folder / "deaf", "");
    const pid_t launcher = fork();
    if (launcher == 0) {
      std::signal(signal, SIG_DFL);
      // Once, rank 2 does not hear.
      launch_script(
          R"([ $RANK = 2 ] && [ -e "$0/deaf" ] && trap "" TERM || trap 'rm "$0/$RANK"; exit 1' TERM
             echo $$ > "$0/new$RANK"; mv "$0/new$RANK" "$0/$RANK"; while :; do sleep 0.01; done)",
          folder, 3);
      _exit(0);
    }
    for (const char* rank : {"0", "1", "2"}) {
      while (!std::filesystem::exists(folder / rank)) usleep(1000);
    }
    const int deaf = std::stoi(io::read_text_file(folder / "2"));
    kill(launcher, signal);
    int status = 0;
    ASSERT_EQ(waitpid(launcher, &status, 0), launcher);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    EXPECT_EQ(folder.entries(), signal == SIGINT ? 2U : 0U);
    EXPECT_EQ(kill(deaf, 0), -1);
  }
}

TEST(RankLauncher, AGrandchildThatHoldsStandardErrorIsNotWaitedFor) {
  const TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  // Grandchildren note themselves before they stand still, and hold nothing of this program's but standard error: one
  // that begins after its rank was killed may be left over.
  launch_script(R"(sh -c 'echo $$ > "$0/$RANK"; exec sleep 100' "$0" >/dev/null &
                   until [ -s "$0/$RANK" ]; do sleep 0.01; done)",
                folder, 2);
  expect_error(Status::kDevice, "rank 1: out of luck", [&] {
    launch_script(R"(sh -c 'echo $$ > "$0/again$RANK"; exec sleep 100' "$0" >/dev/null &
                     [ $RANK = 0 ] || until [ -s "$0/again$RANK" ]; do sleep 0.01; done
                     [ $RANK = 0 ] || { echo "uniep run: out of luck" >&2; exit 1; })",
                  folder, 2);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_FALSE(has_children());
  int grandchildren = 0;
  for (const char* file : {"0", "1", "again0", "again1"}) {
    const std::string id = std::filesystem::exists(folder / file) ? io::read_text_file(folder / file) : "";
    if (!id.empty()) grandchildren += kill(std::stoi(id), SIGKILL) == 0 ? 1 : 0;
  }
  EXPECT_GE(grandchildren, 3);
}

// A last line may be a failure's, which is told once.
TEST(RankLauncher, LinesComeWhileRanksRun) {
  const TemporaryFolder folder;
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  const pid_t launcher = fork();
  if (launcher == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    launch_script(R"([ $RANK = 0 ] || exit 0
                     printf "one\ntwo\n" >&2
                     tries=0; until [ -e "$0/read" ] || [ $tries = 1000 ]; do sleep 0.01; tries=$((tries + 1)); done
                     printf three >&2)",
                  folder, 2);
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  std::array<char, 100> bytes{};
  for (ssize_t count = 1; count > 0;) {
    count = read(ends[0], bytes.data(), bytes.size());
    text.append(bytes.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    if (text == "one\n") io::write_file(folder / "read", "");
  }
  close(ends[0]);
  EXPECT_EQ(text, "one\ntwo\nthree");
  int status = 0;
  ASSERT_EQ(waitpid(launcher, &status, 0), launcher);
  EXPECT_EQ(status, 0);

  testing::internal::CaptureStderr();
  expect_error(Status::kDevice, "rank 1: out of luck",
               [&] { launch_script("[ $RANK = 0 ] || { printf 'chatter\nout of luck\n' >&2; exit 1; }", folder, 2); });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "chatter\n");
}

TEST(RankLauncher, BadUsageIsNoRanksOwn) {
  const TemporaryFolder folder;
  expect_error(Status::kInvalidArgument, "--tokens: wrong",
               [&] { launch_script(R"(echo "uniep run: --tokens: wrong" >&2; exit 2)", folder, 4); });
  EXPECT_FALSE(has_children());
}

TEST(RankLauncher, ARankThatSaysNothingIsNamedWithHowItEnded) {
  const TemporaryFolder folder;
  expect_error(Status::kDevice, "rank 0: ended by signal 9", [&] { launch_script("kill -9 $$", folder, 1); });
  expect_error(Status::kDevice, "rank 0: ended with exit status 3", [&] { launch_script("exit 3", folder, 1); });
  expect_error(Status::kDevice, "can not start", [&] {
    cli::launch_ranks({folder / "no-such-program", {}}, "uniep run", 2);
  });
  EXPECT_FALSE(has_children());
}

TEST(RankLauncher, LongMessagesDoNotStopARank) {
  const TemporaryFolder folder;
  testing::internal::CaptureStderr();
  launch_script("i=0; while [ $i -lt 20000 ]; do echo 0123456789 >&2; i=$((i+1)); done", folder, 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr().size(), 2U * 20000 * 11);
}

TEST(RankLauncher, TheProgramItselfFailsInOneLine) {
  if (cuda::has_hopper_gpu()) GTEST_SKIP() << "there is a GPU";
  // "engine cuda: ..." or, built without CUDA's headers, "... so it has no cuda engine ...".
  expect_error(Status::kInvalidArgument, "cuda", [] {
    cli::launch_ranks({UNIEP_COMMAND, {"run", "--engine", "cuda", "--launch", "processes"}}, "uniep run", 2);
  });
}

TEST(Program, AFileThatMayNotGrowIsAFailedWrite) {
  const TemporaryFolder folder;
  const std::string script =
      "cd \"$0\" && ulimit -f 1 && exec '" UNIEP_COMMAND "' run --engine cpu --tokens 64 --out out 2> message";
  expect_error(Status::kDevice, "rank 0: ended with exit status 1", [&] { launch_script(script, folder, 1); });
  EXPECT_NE(io::read_text_file(folder / "message").find("File too large"), std::string::npos);
  EXPECT_EQ(folder.entries(), 1u) << "the message alone";
}

TEST(LaunchProcesses, WhatCanNotWorkIsRefusedWithoutStartingAnything) {
  const auto expect_refusal = [](const std::vector<std::string>& more, const std::string& text) {
    const CommandResult result = run_command(join({"run", "--launch", "processes"}, more));
    EXPECT_EQ(result.status, 2);
    EXPECT_TRUE(result.one_line_error()) << result.err;
    EXPECT_NE(result.err.find(text), std::string::npos) << result.err;
  };
  {
    const ScopedRankVariables none(Variables{});
    expect_refusal({"--engine", "cpu"}, "--launch: processes needs the cuda engine");
    expect_refusal({"--engine", "cuda"}, "torchrun");
  }
  {
    const ScopedRankVariables half(Variables{{"WORLD_SIZE", "2"}});
    expect_refusal({"--engine", "cuda"}, "RANK: not set");
  }
  const ScopedRankVariables second({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"MASTER_PORT", "29500"}});
  expect_refusal({"--engine", "cuda", "--ranks", "4"}, "--ranks: 4; must be the environment's WORLD_SIZE, 2");
  expect_refusal({"--engine", "cpu"}, "--launch");
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

TEST(LaunchProcesses, TheRanksPartsOfABatchMakeTheWhole) {
  cli::LayerOptions options;
  options.ranks = 4;
  options.tokens_given = {5, 0, 9, 3};
  options.shape = {24, 16, 8, 3};
  const cli::LayerData whole = cli::make_layer_data(options, {}, true, {0, 4});
  cli::LayerData joined;
  for (int rank = 0; rank < 4; ++rank) {
    const cli::LayerData part = cli::make_layer_data(options, {}, true, {rank, 1});
    EXPECT_EQ(part.ids, whole.ids);
    EXPECT_EQ(part.probs, whole.probs);
    EXPECT_EQ(part.x_of(rank), part.x.data());
    EXPECT_EQ(part.w2_of(rank), part.w2.data());
    EXPECT_EQ(whole.x_of(rank) - whole.x.data(), static_cast<int64_t>(joined.x.size()));
    EXPECT_EQ(whole.dy_of(rank) - whole.dy.data(), static_cast<int64_t>(joined.dy.size()));
    EXPECT_EQ(whole.w1_of(rank) - whole.w1.data(), static_cast<int64_t>(joined.w1.size()));
    EXPECT_EQ(whole.w2_of(rank) - whole.w2.data(), static_cast<int64_t>(joined.w2.size()));
    append(joined.x, part.x);
    append(joined.dy, part.dy);
    append(joined.w1, part.w1);
    append(joined.w2, part.w2);
  }
  const auto same = [](const std::vector<BFloat16>& a, const std::vector<BFloat16>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](BFloat16 left, BFloat16 right) { return left.bits == right.bits; });
  };
  EXPECT_TRUE(same(joined.x, whole.x));
  EXPECT_TRUE(same(joined.dy, whole.dy));
  EXPECT_TRUE(same(joined.w1, whole.w1));
  EXPECT_TRUE(same(joined.w2, whole.w2));
}

TEST(LaunchProcesses, GatheredEventsKeepWhatTheyAreAndHowLongTheyTook) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 2;
  Group group(options);
  const std::vector<TileEvent> own = {
      {.rank = 0,
       .worker = 3,
       .stage = "fc1",
       .expert = 1,
       .m = 2,
       .n = 4,
       .wait_begin_ns = 0,
       .begin_ns = 10,
       .end_ns = 30},
      {.rank = 1,
       .copy_agent = true,
       .stage = "combine",
       .expert = 2,
       .wait_begin_ns = 1000,
       .begin_ns = 1000,
       .end_ns = 1050},
      {.rank = 1, .stage = "wgrad_fc2", .wait_begin_ns = 5, .begin_ns = 7, .end_ns = 8}};
  const std::vector<TileEvent> all = cli::gathered_events(group, own);
  ASSERT_EQ(all.size(), own.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_STREQ(all[i].stage, own[i].stage);
    EXPECT_EQ(all[i].rank, own[i].rank);
    EXPECT_EQ(all[i].worker, own[i].worker);
    EXPECT_EQ(all[i].copy_agent, own[i].copy_agent);
    EXPECT_EQ(all[i].expert, own[i].expert);
    EXPECT_EQ(all[i].m, own[i].m);
    EXPECT_EQ(all[i].n, own[i].n);
    EXPECT_EQ(all[i].begin_ns - all[i].wait_begin_ns, own[i].begin_ns - own[i].wait_begin_ns);
    EXPECT_EQ(all[i].end_ns - all[i].begin_ns, own[i].end_ns - own[i].begin_ns);
  }
  EXPECT_EQ(all[0].end_ns, all[1].end_ns);  // the ranks' last events end together
  EXPECT_EQ(all[2].wait_begin_ns, 0);
}

}  // namespace
}  // namespace uniep::test
