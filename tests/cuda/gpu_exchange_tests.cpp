// Dispatch and combine on GPUs against the host, byte by byte: pull and push, shapes and rings, ragged and empty ranks,
// unused slots, one expert that gets everything, combine flat and by groups, dprobs; many calls under load; a rank that
// never comes. Virtual ranks on one GPU, and a GPU each where there are several. Exit status 77 without a GPU.
// Usage: gpu_exchange_tests [--verbose] [--repeats N] [--cases N], or --compile: only fills the kernel cache
#include <cstdlib>
#include <random>

#include "api/place.h"
#include "engine/cuda/exchange/exchange_session.h"
#include "model/elementwise.h"
#include "tests/cuda/device_values.h"
#include "tests/cuda/group_exchange.h"
#include "tests/cuda/traffic.h"

namespace uniep::cuda::test {
namespace {

struct ExchangeCase {
  std::string name;
  std::vector<int64_t> tokens;
  LayerShape shape;
  std::string routing = "uniform";  // or "one", "holes"
  int groups = 0;
  Direction direction = Direction::kForward;
  Schedule schedule;
  int workers = 4;
  int pull_parts = 4;
  ExchangeConfig dispatch = default_exchange_configs()[0];
  ExchangeConfig combine = default_exchange_configs()[1];
};

int ranks_of(const ExchangeCase& c) {
  return static_cast<int>(c.tokens.size());
}

// Top-k ids without repetition; "holes" leaves some slots and some tokens unused.
std::vector<int32_t> random_ids(const ExchangeCase& c, int64_t tokens, std::mt19937_64& random) {
  std::vector<int32_t> ids;
  std::vector<int32_t> experts(static_cast<size_t>(c.shape.experts));
  for (size_t i = 0; i < experts.size(); ++i) experts[i] = static_cast<int32_t>(i);
  for (int64_t token = 0; token < tokens; ++token) {
    const bool idle = c.routing == "holes" && random() % 5 == 0;
    for (int64_t slot = 0; slot < c.shape.topk; ++slot) {
      std::swap(experts[static_cast<size_t>(slot)],
                experts[static_cast<size_t>(slot) + random() % (experts.size() - static_cast<size_t>(slot))]);
      const bool hole = idle || (c.routing == "holes" && random() % 3 == 0);
      if (c.routing == "one") {
        ids.push_back(slot == 0 ? 0 : -1);
      } else {
        ids.push_back(hole ? -1 : experts[static_cast<size_t>(slot)]);
      }
    }
  }
  return ids;
}

std::shared_ptr<const internal::PlacementState> place(const ExchangeCase& c, std::mt19937_64& random) {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> probs;
  std::vector<Routing> routings;
  for (const int64_t tokens : c.tokens) {
    ids.push_back(random_ids(c, tokens, random));
    probs.emplace_back(ids.back().size(), 0.5f);
  }
  for (size_t rank = 0; rank < c.tokens.size(); ++rank) {
    Routing routing;
    routing.tokens = c.tokens[rank];
    routing.topk_ids = ids[rank].data();
    routing.probs = probs[rank].data();
    routings.push_back(routing);
  }
  return place_on_host(c.shape, ranks_of(c), routings, Capacity{});
}

void poison(void* memory, int64_t bytes) {
  if (bytes == 0) return;
  check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0xff, static_cast<size_t>(bytes), nullptr),
        "poison");
}

class Exchange {
 public:
  Exchange(const ExchangeCase& c, const std::vector<int>& devices, uint64_t seed)
      : case_(c), random_(seed), devices_(devices), state_(place(c, random_)) {
    ExchangeRequest request;
    request.program.shape = c.shape;
    request.program.numerics.combine_groups = c.groups;
    request.program.schedule = c.schedule;
    request.program.direction = c.direction;
    request.program.workers = c.workers;
    request.program.pull_parts = c.pull_parts;
    request.placement = state_;
    request.devices = devices;
    request.dispatch = c.dispatch;
    request.combine = c.combine;
    request.wait_seconds = 2.0;
    request.arrival_seconds = 2.0;
    session_ = std::make_unique<ExchangeSession>(request);
    for (int rank = 0; rank < ranks_of(c); ++rank) {
      const ScopedDevice scope(devices[rank]);
      const int64_t rows = state_->padded_rows[rank];
      inputs_.push_back(random_values(c.tokens[rank] * c.shape.hidden, random_));
      outputs_.push_back(random_values(rows * c.shape.hidden, random_));
      std::vector<float> chunks(static_cast<size_t>(rows * session_->prob_chunk_count()));
      for (float& chunk : chunks) chunk = static_cast<float>(random_() % 2000) / 1000.0f - 1.0f;
      prob_chunks_.push_back(chunks);
      to_device(session_->arrays(rank).input, inputs_.back());
      to_device(session_->arrays(rank).output_rows, outputs_.back());
      to_device(session_->arrays(rank).prob_chunks, prob_chunks_.back());
    }
  }

  ExchangeSession& session() { return *session_; }

  void poison_results() {
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      const ExchangeSession::Arrays& own = session_->arrays(rank);
      const int64_t tokens = case_.tokens[rank], row = case_.shape.hidden * 2;
      poison(own.rows, state_->padded_rows[rank] * row);
      poison(own.slots, tokens * session_->slot_count() * row);
      poison(own.output, tokens * row);
      poison(own.prob_slots, tokens * case_.shape.topk * 4);
      poison(own.dprobs, tokens * case_.shape.topk * 4);
    }
    session_->synchronize();
  }

  // Empty, or what is wrong.
  std::string dispatch_difference() {
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      const int64_t hidden = case_.shape.hidden, rows = state_->padded_rows[rank];
      const std::vector<BFloat16> got = from_device(session_->arrays(rank).rows, rows * hidden);
      const std::vector<BFloat16> zeros(static_cast<size_t>(hidden));
      for (int64_t row = 0; row < rows; ++row) {
        const RowSource source = state_->rank[rank].rows[row];
        const BFloat16* expected = source.rank < 0 ? zeros.data() : inputs_[source.rank].data() + source.token * hidden;
        if (std::memcmp(got.data() + row * hidden, expected, static_cast<size_t>(hidden) * 2) != 0) {
          return "rank " + std::to_string(rank) + " row " + std::to_string(row) + " of source " +
                 std::to_string(source.rank) + " token " + std::to_string(source.token);
        }
      }
    }
    return "";
  }

  // Straight after a dispatch every block counts all its rows, padding included.
  std::string counter_difference() {
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      std::string wrong = counter_difference(rank);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  std::string combine_difference() {
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      const int64_t hidden = case_.shape.hidden, tokens = case_.tokens[rank], topk = case_.shape.topk;
      const std::vector<BFloat16> got = from_device(session_->arrays(rank).output, tokens * hidden);
      const std::vector<float> dprobs = from_device(session_->arrays(rank).dprobs, tokens * topk);
      std::vector<BFloat16> expected(static_cast<size_t>(hidden));
      for (int64_t token = 0; token < tokens; ++token) {
        expected_sum(rank, token, expected);
        if (std::memcmp(got.data() + token * hidden, expected.data(), expected.size() * 2) != 0) {
          return "rank " + std::to_string(rank) + " token " + std::to_string(token);
        }
        for (int64_t slot = 0; case_.direction == Direction::kBackward && slot < topk; ++slot) {
          const float wanted = expected_prob_gradient(rank, token * topk + slot);
          if (std::memcmp(&wanted, &dprobs[static_cast<size_t>(token * topk + slot)], 4) != 0) {
            return "dprobs of rank " + std::to_string(rank) + " token " + std::to_string(token);
          }
        }
      }
    }
    return "";
  }

 private:
  std::string counter_difference(int rank) {
    const RankProgram& p = session_->program().rank(rank);
    const SignalLayout& layout = session_->layout();
    const uint32_t epoch = from_device(session_->epoch(rank), 1)[0];
    const auto bank =
        from_device(session_->arrays(rank).counters + (epoch & 1u) * layout.counter_total, layout.counter_total);
    for (int32_t expert = 0; expert < p.local_experts; ++expert) {
      const int32_t first = p.block_begin[expert];
      for (int32_t block = first; block < p.block_begin[expert + 1]; ++block) {
        const RowRange range = rows_of_block(p, p.first_expert + expert, block - first);
        const uint32_t landed = bank[static_cast<size_t>(layout.counters[static_cast<int>(CounterSpace::kRowsLanded)]) +
                                     static_cast<size_t>(rows_counter(p, 0, block))];
        if (landed == static_cast<uint32_t>(range.padded_end - range.begin)) continue;
        return "rank " + std::to_string(rank) + " block " + std::to_string(block) + " counts " +
               std::to_string(landed) + " of " + std::to_string(range.padded_end - range.begin);
      }
    }
    return "";
  }

  // fp32, ascending from +0, rounded once; with groups first inside each group.
  void expected_sum(int rank, int64_t token, std::vector<BFloat16>& expected) {
    const internal::RankPlacement& own = state_->rank[rank];
    const int64_t hidden = case_.shape.hidden, topk = case_.shape.topk;
    const int64_t groups = case_.groups > 0 ? case_.groups : 1;
    std::vector<float> sum(static_cast<size_t>(hidden), 0.0f), part(static_cast<size_t>(hidden));
    for (int64_t group = 0; group < groups; ++group) {
      bool used = false;
      std::fill(part.begin(), part.end(), 0.0f);
      std::vector<float>& target = case_.groups > 0 ? part : sum;
      for (int64_t slot = 0; slot < topk; ++slot) {
        const int32_t expert = own.expert_of_slot[token * topk + slot];
        if (expert < 0 || expert / (case_.shape.experts / groups) != group) continue;
        used = true;
        const BFloat16* row =
            outputs_[state_->rank_of_expert[expert]].data() + own.row_of_slot[token * topk + slot] * hidden;
        for (int64_t i = 0; i < hidden; ++i) target[i] = add(target[i], to_float(row[i]));
      }
      if (case_.groups == 0 || !used) continue;
      for (int64_t i = 0; i < hidden; ++i) sum[i] = add(sum[i], to_float(to_bfloat16(part[i])));
    }
    for (int64_t i = 0; i < hidden; ++i) expected[i] = to_bfloat16(sum[i]);
  }

  float expected_prob_gradient(int rank, int64_t entry) {
    const internal::RankPlacement& own = state_->rank[rank];
    const int32_t expert = own.expert_of_slot[entry];
    if (expert < 0) return 0.0f;
    const int64_t chunks = session_->prob_chunk_count();
    const float* row = prob_chunks_[state_->rank_of_expert[expert]].data() + own.row_of_slot[entry] * chunks;
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum = add(sum, row[chunk]);
    return sum;
  }

  const ExchangeCase case_;
  std::mt19937_64 random_;
  std::vector<int> devices_;
  std::shared_ptr<const internal::PlacementState> state_;
  std::unique_ptr<ExchangeSession> session_;
  std::vector<std::vector<BFloat16>> inputs_, outputs_;
  std::vector<std::vector<float>> prob_chunks_;
};

ExchangeCase basic(const std::string& name, std::vector<int64_t> tokens, int64_t hidden, int64_t experts,
                   int64_t topk) {
  ExchangeCase c;
  c.name = name;
  c.tokens = std::move(tokens);
  c.shape.hidden = hidden;
  c.shape.intermediate = 192;
  c.shape.experts = experts;
  c.shape.topk = topk;
  c.schedule.fusion = Fusion::kNone;
  c.schedule.combine.transport = CombineTransport::kStaged;
  return c;
}

std::vector<ExchangeCase> named_cases() {
  std::vector<ExchangeCase> cases;
  cases.push_back(basic("four ranks", {200, 200, 200, 200}, 512, 16, 4));
  cases.push_back(basic("one rank", {300}, 256, 8, 3));
  cases.push_back(basic("two ranks, one empty", {0, 150}, 1024, 8, 2));
  cases.push_back(basic("no tokens at all", {0, 0}, 64, 4, 2));
  cases.push_back(basic("eight ranks, ragged", {64, 1, 0, 300, 33, 31, 5, 129}, 384, 32, 8));
  cases.push_back(basic("H 8", {100, 77}, 8, 4, 2));
  cases.push_back(basic("H 16384", {70, 40}, 16384, 8, 3));
  cases.push_back(basic("H 7168", {256, 256, 256, 256}, 7168, 32, 8));
  cases.push_back(basic("El 1", {90, 10, 60, 200}, 2880, 4, 4));
  cases.push_back(basic("one expert", {200, 90, 0, 31}, 256, 16, 4));
  cases.back().routing = "one";
  cases.push_back(basic("holes", {200, 90, 0, 31}, 512, 16, 6));
  cases.back().routing = "holes";
  cases.push_back(basic("many slots", {60, 50}, 136, 64, 32));
  const size_t count = cases.size();
  for (size_t i = 0; i < count; ++i) {
    ExchangeCase c = cases[i];
    c.name += ", push, by groups, backward";
    c.schedule.dispatch.transport = DispatchTransport::kPush;
    c.groups = ranks_of(c) * (c.shape.experts / ranks_of(c) > 1 ? 2 : 1);
    c.direction = Direction::kBackward;
    c.schedule.combine.column_chunks = 2;
    cases.push_back(c);
  }
  return cases;
}

ExchangeCase random_case(int number, std::mt19937_64& random) {
  const auto pick = [&](std::initializer_list<int64_t> values) { return values.begin()[random() % values.size()]; };
  const int64_t ranks = pick({1, 2, 4, 8});
  const int64_t experts = ranks * pick({1, 2, 3, 8});
  std::vector<int64_t> tokens;
  for (int64_t rank = 0; rank < ranks; ++rank) tokens.push_back(pick({0, 1, 31, 64, 130, 257}));
  const int64_t topk = std::min<int64_t>(experts, pick({1, 2, 4, 8, 11}));
  ExchangeCase c =
      basic("random " + std::to_string(number), tokens, 8 * pick({1, 3, 17, 64, 90, 256, 300}), experts, topk);
  c.routing = pick({0, 1}) == 0 ? "uniform" : "holes";
  c.direction = pick({0, 1}) == 0 ? Direction::kForward : Direction::kBackward;
  if (pick({0, 1}) == 0) c.groups = static_cast<int>(experts / pick({1, experts / ranks}));
  if (c.groups > 32) c.groups = 0;
  c.schedule.dispatch.transport = pick({0, 1}) == 0 ? DispatchTransport::kPull : DispatchTransport::kPush;
  c.schedule.dispatch.dedup = pick({0, 1}) == 0;
  c.schedule.order.experts_per_wave = static_cast<int>(pick({1, 2, 5}));
  c.schedule.order.source_rotation = pick({0, 1}) == 0;
  c.schedule.queue = pick({0, 1}) == 0 ? QueueKind::kStatic : QueueKind::kDynamic;
  c.schedule.combine.column_chunks = static_cast<int>(pick({1, 2, 3, 8}));
  c.workers = static_cast<int>(pick({1, 2, 5, 8}));
  c.pull_parts = static_cast<int>(pick({1, 3, 8, 32}));
  return c;
}

// Rings and teams of other sizes, each a kernel of its own.
std::vector<ExchangeConfig> ring_configs() {
  return {{.warps = 16, .reduce_warps = 4, .team_warps = 4, .chunk_bytes = 1024, .stages = 1},
          {.warps = 8, .reduce_warps = 2, .team_warps = 3, .chunk_bytes = 512, .stages = 32},
          {.warps = 8, .reduce_warps = 0, .team_warps = 1, .chunk_bytes = 16384, .stages = 1}};
}

std::vector<ExchangeCase> ring_cases() {
  std::vector<ExchangeCase> cases;
  for (const ExchangeConfig& config : ring_configs()) {
    ExchangeCase c = basic("chunk " + std::to_string(config.chunk_bytes) + " stages " + std::to_string(config.stages),
                           {150, 0, 77, 130}, 2880, 16, 5);
    c.dispatch = c.combine = config;
    cases.push_back(c);
    cases.push_back(c);
    cases.back().name += ", by groups";
    cases.back().groups = 8;
  }
  return cases;
}

void run_case(Results& results, const ExchangeCase& c, const std::vector<int>& devices, uint64_t seed) {
  std::string wrong;
  try {
    Exchange exchange(c, devices, seed);
    exchange.poison_results();
    exchange.session().dispatch();
    exchange.session().check();
    wrong = exchange.dispatch_difference() + exchange.counter_difference();
    if (!wrong.empty()) wrong = "dispatch: " + wrong;
    exchange.session().combine();
    exchange.session().check();
    const std::string combine = exchange.combine_difference();
    if (!combine.empty()) wrong += " combine: " + combine;
  } catch (const Error& error) {
    wrong = error.what();
  }
  results.record(c.name, wrong.empty(), wrong);
}

// Calls in a row with new epochs, across their wrap, beside copies over PCIe; every hundredth's results are compared.
void run_many(Results& results, const std::vector<int>& devices, int repeats, DispatchTransport transport) {
  const char* const name = transport == DispatchTransport::kPull ? "many calls, pull" : "many calls, push";
  ExchangeCase c = basic(name, std::vector<int64_t>(devices.size(), 65), 264, 8 * devices.size(), 4);
  c.groups = static_cast<int>(devices.size());
  c.schedule.dispatch.transport = transport;
  Exchange exchange(c, devices, 5);
  for (int rank = 0; rank < ranks_of(c); ++rank) {
    const ScopedDevice scope(devices[rank]);
    to_device(exchange.session().epoch(rank), std::vector<uint32_t>{0xffffffffu - static_cast<uint32_t>(repeats)});
  }
  Traffic traffic(1 + *std::max_element(devices.begin(), devices.end()));
  std::string wrong;
  for (int i = 0; i < repeats && wrong.empty(); ++i) {
    if (i % 100 == 0 || i + 1 == repeats) exchange.poison_results();
    if (i % 200 == 0) traffic.go_on();
    exchange.session().dispatch();
    exchange.session().combine();
    if (i % 100 != 0 && i + 1 != repeats) continue;
    exchange.session().check();
    wrong = exchange.dispatch_difference() + exchange.combine_difference();
  }
  results.record(c.name + " (" + std::to_string(repeats) + ")", wrong.empty(), wrong);
}

void run_time_out(Results& results, const std::vector<int>& devices) {
  const ExchangeCase c = basic("a rank that never comes", std::vector<int64_t>(devices.size(), 100), 256, 16, 4);
  Exchange exchange(c, devices, 6);
  const int silent = ranks_of(c) - 1;
  exchange.session().dispatch();
  exchange.session().check();
  exchange.session().dispatch(silent);
  std::string message = "no error";
  try {
    exchange.session().check();
  } catch (const Error& error) {
    message = error.status() == Status::kTimeout ? error.what() : "another error";
  }
  const std::string wanted = "for rank " + std::to_string(silent) + " to arrive: expected 2, seen 1";
  results.record(c.name + ": is named", message.find(wanted) != std::string::npos, message);
  exchange.session().recover();
  exchange.poison_results();
  exchange.session().dispatch();
  exchange.session().combine();
  exchange.session().check();
  const std::string wrong = exchange.dispatch_difference() + exchange.combine_difference();
  results.record(c.name + ": works again", wrong.empty(), wrong);
}

// The public functions, among each other's calls.
void run_group(Results& results, const std::vector<int>& devices) {
  GroupExchange exchange({100, 0, 77, 31}, devices, {.hidden = 520, .intermediate = 192, .experts = 16, .topk = 4},
                         {.workers = 8});
  exchange.call();
  const std::string wrong = exchange.difference();
  results.record("dispatch and combine of a group", wrong.empty(), wrong);
}

// With a GPU for each rank where there are enough, else all ranks on one.
std::vector<int> devices_for(int ranks, bool spread) {
  std::vector<int> devices;
  for (int rank = 0; rank < ranks; ++rank) devices.push_back(spread ? rank * device_count() / ranks : 0);
  return devices;
}

void run_all(Results& results, bool spread, int cases, int repeats) {
  std::printf("%s\n", spread ? "a GPU each" : "virtual ranks");
  std::mt19937_64 random(11);
  std::vector<ExchangeCase> all = named_cases();
  for (const ExchangeCase& c : ring_cases()) all.push_back(c);
  for (int i = 0; i < cases; ++i) all.push_back(random_case(i, random));
  for (const ExchangeCase& c : all) run_case(results, c, devices_for(ranks_of(c), spread), random());
  for (const DispatchTransport transport : {DispatchTransport::kPull, DispatchTransport::kPush}) {
    run_many(results, devices_for(4, spread), repeats, transport);
  }
  run_time_out(results, devices_for(4, spread));
  run_group(results, devices_for(4, spread));
}

// Compiles the kernels of all tests into the cache; needs no GPU.
void compile_all() {
  std::vector<KernelRequest> requests{begin_call_request()};
  std::vector<ExchangeConfig> configs = default_exchange_configs();
  for (const ExchangeConfig& config : ring_configs()) configs.push_back(config);
  for (const ExchangeConfig& config : configs) requests.push_back(exchange_request(config));
  compile_kernels(requests);
}

int run(int argc, char** argv) {
  Results results;
  int repeats = 1000, cases = 40;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    if (std::strcmp(argv[i], "--repeats") == 0 && i + 1 < argc) repeats = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--cases") == 0 && i + 1 < argc) cases = std::atoi(argv[++i]);
  }
  run_all(results, false, cases, repeats);
  if (device_count() > 1) run_all(results, true, cases, repeats);
  std::printf("exchange tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--compile") == 0) {
    uniep::cuda::test::compile_all();
    return 0;
  }
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
