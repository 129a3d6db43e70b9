// A process a GPU on a stand-in for the CUDA driver: what one rank alone refuses, by the C API or behind it, ends the
// others' exchange of hosts at once, and recover() makes the group usable again; what all ranks refuse is harmless.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "support/processes.h"
#include "uniep/c_api.h"
#include "uniep/group.h"

namespace uniep::test::refused_calls {
namespace {

constexpr int kRanks = 2, kTokens = 16, kHidden = 64, kIntermediate = 32, kExperts = 4, kTopk = 2;
constexpr double kAtOnceSeconds = 10, kArrivalSeconds = 40;

// One rank's calls, by the C API. Each says "none", or its status and error.
class Rank {
 public:
  Rank(int rank, const std::string& id) {
    const int32_t devices[] = {0, 1};
    uniep_group_options options{};
    options.size = sizeof(options);
    options.engine = UNIEP_ENGINE_CUDA;
    options.ranks = kRanks;
    options.arrival_timeout_seconds = kArrivalSeconds;
    options.launch = UNIEP_LAUNCH_PROCESSES;
    options.rank = rank;
    options.unique_id = id.data();
    options.device_count = kRanks;
    options.devices = devices;
    created_ = said(uniep_group_create(&options, &group_));
    for (int slot = 0; slot < kTokens * kTopk; ++slot) ids_.push_back((slot / kTopk + slot % kTopk) % kExperts);
  }
  ~Rank() {
    uniep_symmetric_destroy(buffer_);
    uniep_placement_destroy(placement_);
    uniep_group_destroy(group_);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  const std::string& created() const { return created_; }
  std::string recover() { return said(uniep_group_recover(group_)); }

  std::string place(bool wrong, bool by_need = false) {
    uniep_routing routing{};
    routing.size = sizeof(routing);
    routing.tokens = kTokens;
    routing.topk_ids = ids_.data();
    routing.probs = probs_.data();
    if (wrong) routing.index_type = 7;
    const uniep_capacity capacity{.size = sizeof(capacity), .rows = 4096, .tokens = 128};
    uniep_placement_destroy(std::exchange(placement_, nullptr));
    return said(uniep_place(group_, &config_, &routing, 1, by_need ? nullptr : &capacity, &placement_));
  }
  std::string forward(const void* x, const char* schedule) {
    uniep_weights weights{};
    weights.size = sizeof(weights);
    weights.w1 = w1_.data();
    weights.w2 = w2_.data();
    uniep_forward_arguments own{};
    own.size = sizeof(own);
    own.x = x;
    own.weights = &weights;
    own.y = y_.data();
    return said(uniep_forward(group_, &config_, schedule, placement_, &own, 1, nullptr));
  }
  std::string combine(bool with_dprobs) {
    uniep_combine_arguments own{};
    own.size = sizeof(own);
    own.rows = rows_.data();
    own.y = y_.data();
    if (with_dprobs) own.row_dprobs = row_dprobs_.data(), own.dprobs = dprobs_.data();
    return said(uniep_combine(group_, &config_, "auto", placement_, &own, 1));
  }
  std::string allocate(std::size_t bytes) {
    uniep_symmetric_destroy(std::exchange(buffer_, nullptr));
    return said(uniep_symmetric_allocate(group_, bytes, &buffer_));
  }
  std::string share(int count) {
    void* memory[kRanks] = {};
    uniep_symmetric_data(buffer_, first_rank(), &memory[0]);
    uniep_symmetric_buffer* shared = nullptr;
    const std::string end = said(uniep_symmetric_register(group_, memory, count, 4096, &shared));
    uniep_symmetric_destroy(shared);
    return end;
  }
  const void* x() const { return x_.data(); }

 private:
  static std::string said(uniep_status status) {
    return status == UNIEP_OK ? "none" : std::string(uniep_status_name(status)) + ": " + uniep_last_error();
  }
  static uniep_layer_config layer_config() {
    uniep_layer_config config{};
    config.size = sizeof(config);
    config.hidden = kHidden;
    config.intermediate = kIntermediate;
    config.experts = kExperts;
    config.topk = kTopk;
    return config;
  }
  int first_rank() const {
    uniep_group_info info{};
    info.size = sizeof(info);
    uniep_group_describe(group_, &info);
    return info.first_local_rank;
  }

  const uniep_layer_config config_ = layer_config();
  std::vector<uint16_t> x_ = std::vector<uint16_t>(kTokens * kHidden), y_ = x_;
  std::vector<uint16_t> w1_ = std::vector<uint16_t>(kExperts / kRanks * 2 * kIntermediate * kHidden), w2_ = w1_;
  std::vector<uint16_t> rows_ = std::vector<uint16_t>(4096 * kHidden);
  std::vector<float> probs_ = std::vector<float>(kTokens * kTopk, 0.5f), dprobs_ = probs_;
  std::vector<float> row_dprobs_ = std::vector<float>(4096);
  std::vector<int32_t> ids_;
  uniep_group* group_ = nullptr;
  uniep_placement* placement_ = nullptr;
  uniep_symmetric_buffer* buffer_ = nullptr;
  std::string created_;
};

struct Mistake {
  const char* name;
  const char* reason;
  void (*prepare)(Rank& rank);
  std::string (*call)(Rank& rank, bool wrong);
};
std::ostream& operator<<(std::ostream& out, const Mistake& mistake) {
  return out << mistake.name;
}

void place_before(Rank& rank) {
  rank.place(false);
}
const Mistake kMistakes[] = {
    {"Constant", "index_type: 7; legal are the constants", [](Rank&) {},
     [](Rank& rank, bool wrong) { return rank.place(wrong); }},
    {"Array", "x: null on rank ", place_before,
     [](Rank& rank, bool wrong) { return rank.forward(wrong ? nullptr : rank.x(), "auto"); }},
    {"Schedule", "tile.n", place_before,
     [](Rank& rank, bool wrong) { return rank.forward(rank.x(), wrong ? "tile.n=777" : "auto"); }},
    {"Size", "bytes: 0; symmetric memory has at least one", [](Rank&) {},
     [](Rank& rank, bool wrong) { return rank.allocate(wrong ? 0 : 4096); }},
    {"Count", "count: 2; must be 1", [](Rank& rank) { rank.allocate(4096); },
     [](Rank& rank, bool wrong) { return rank.share(wrong ? 2 : 1); }},
};

std::vector<Process> start(const std::function<void(Rank& own, int rank, const Reporter&)>& body) {
  const std::string id = make_unique_id();
  std::vector<Process> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
      ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
      Rank own(rank, id);
      reporter.line(own.created());
      body(own, rank, reporter);
      reporter.line("end");
    });
  }
  for (Process& process : processes) EXPECT_EQ(process.line(), "none");
  return processes;
}

class Refused : public testing::TestWithParam<Mistake> {};

TEST_P(Refused, ByOneRankEndsTheOthersCallAtOnce) {
  const Mistake& mistake = GetParam();
  std::vector<Process> processes = start([&](Rank& own, int rank, const Reporter& reporter) {
    mistake.prepare(own);
    const double begin = monotonic_seconds();
    reporter.line(mistake.call(own, rank == 1));
    reporter.line(monotonic_seconds() - begin < kAtOnceSeconds ? "at once" : "late");
    reporter.line(own.recover());
    for (int again = 0; again < 2; ++again) reporter.line(mistake.call(own, false));
  });
  const std::string told = processes[0].line(60), refused = processes[1].line(60);
  EXPECT_NE(told.find("rank 1 refused the call: "), std::string::npos) << told;
  EXPECT_NE(told.find("recover() makes the group usable again"), std::string::npos) << told;
  for (const std::string& line : {told, refused}) EXPECT_NE(line.find(mistake.reason), std::string::npos) << line;
  for (Process& process : processes) {
    EXPECT_EQ(process.line(), "at once");
    for (int line = 0; line < 3; ++line) EXPECT_EQ(process.line(60), "none");
    EXPECT_EQ(process.line(), "end");
  }
}

TEST_P(Refused, ByAllRanksIsHarmless) {
  const Mistake& mistake = GetParam();
  std::vector<Process> processes = start([&](Rank& own, int, const Reporter& reporter) {
    mistake.prepare(own);
    for (int again = 0; again < 20; ++again) mistake.call(own, true);
    reporter.line(mistake.call(own, true));
    reporter.line(mistake.call(own, false));
    reporter.line(own.recover());
  });
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_NE(line.find(mistake.reason), std::string::npos) << line;
    EXPECT_EQ(line.find("refused the call"), std::string::npos) << line;
    EXPECT_EQ(process.line(), "none");
    EXPECT_EQ(process.line(), "none");
    EXPECT_EQ(process.line(), "end");
  }
}

INSTANTIATE_TEST_SUITE_P(Mistakes, Refused, testing::ValuesIn(kMistakes),
                         [](const testing::TestParamInfo<Mistake>& of) { return of.param.name; });

TEST(Combine, WithDprobsOnOneRankAloneIsAnotherCall) {
  std::vector<Process> processes = start([](Rank& own, int rank, const Reporter& reporter) {
    own.place(false);
    reporter.line(own.combine(rank == 0));
    reporter.line(own.combine(true));
  });
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_NE(line.find("all ranks must make the same calls in the same order"), std::string::npos) << line;
    EXPECT_NE(line.find("combine"), std::string::npos) << line;
    EXPECT_EQ(process.line(), "none");
    EXPECT_EQ(process.line(), "end");
  }
}

// On the stand-in no rank has rows where the placement is by need.
TEST(Combine, WithDprobsOfARankThatHasNeitherTokensNorRows) {
  std::vector<Process> processes = start([](Rank& own, int rank, const Reporter& reporter) {
    own.place(false, true);
    reporter.line(own.combine(rank == 0));
  });
  for (Process& process : processes) {
    EXPECT_EQ(process.line(), "none");
    EXPECT_EQ(process.line(), "end");
  }
}

}  // namespace
}  // namespace uniep::test::refused_calls
