// Dispatch and combine on GPUs against the host, byte by byte, through the public calls: pull and push, shapes and
// rings, ragged and empty ranks, unused slots, one expert that gets everything, combine flat and by groups, dprobs;
// many calls under load; a rank that never comes. Virtual ranks on one GPU, and a GPU each where there are several.
// Exit status 77 without a GPU. Usage: gpu_exchange_tests [--verbose] [--repeats N] [--cases N], or --compile: only
// fills the kernel cache
#include <cstdlib>
#include <random>

#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/calls/exchange_request.h"
#include "engine/cuda/kernels/exchange.h"
#include "model/elementwise.h"
#include "model/place.h"
#include "program/build.h"
#include "program/edges.h"
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
  bool with_dprobs = false;
  PartialSchedule dispatch, combine;
  int workers = 4;

  // Of both.
  void set(const char* field, const std::string& value) {
    dispatch.set(field, value);
    combine.set(field, value);
  }
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

// What the routers of all ranks gave, on the host.
struct Batch {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> probs;
  std::shared_ptr<const internal::PlacementState> placed;
};

Batch random_batch(const ExchangeCase& c, std::mt19937_64& random) {
  Batch batch;
  std::vector<Routing> routings;
  for (const int64_t tokens : c.tokens) {
    batch.ids.push_back(random_ids(c, tokens, random));
    batch.probs.emplace_back(batch.ids.back().size(), 0.5f);
  }
  for (size_t rank = 0; rank < c.tokens.size(); ++rank) {
    routings.push_back({c.tokens[rank], batch.ids[rank].data(), IndexType::kInt32, batch.probs[rank].data(), {}});
  }
  batch.placed = place_on_host(c.shape, ranks_of(c), routings, Capacity{});
  return batch;
}

class Exchange {
 public:
  Exchange(const ExchangeCase& c, const std::vector<int>& devices, uint64_t seed, double timeout_seconds = 2.0)
      : case_(c),
        random_(seed),
        devices_(devices),
        batch_(random_batch(c, random_)),
        ranks_(devices.size()),
        group_(group_options(c, devices, timeout_seconds)) {
    config_.shape = c.shape;
    config_.numerics.combine_groups = c.groups;
    const auto resolved = [&](const PartialSchedule& given, Operation operation) {
      return resolve(given, {.direction = Direction::kForward,
                             .shape = c.shape,
                             .numerics = config_.numerics,
                             .machine = group_.machine(),
                             .operation = operation});
    };
    dispatch_ = resolved(c.dispatch, Operation::kDispatch);
    combine_ = resolved(c.combine, Operation::kCombine);
    std::vector<Routing> routings;
    for (int rank = 0; rank < ranks_of(c); ++rank) routings.push_back(add_rank(rank));
    placement_ = place(group_, c.shape, routings);
  }

  CudaEngine& engine() { return dynamic_cast<CudaEngine&>(group_.implementation()); }
  Group& group() { return group_; }
  void dispatch() { uniep::dispatch(group_, config_, dispatch_, placement_, there_); }
  void combine() { uniep::combine(group_, config_, combine_, placement_, back_); }

  void poison_results() {
    group_.synchronize();
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      for (const Buffer* buffer :
           {&ranks_[rank].rows, &ranks_[rank].row_probs, &ranks_[rank].y, &ranks_[rank].dprobs}) {
        buffer->set_bytes(0xff);
      }
      check(driver().cuCtxSynchronize(), "poison");
    }
  }

  // Empty, or what is wrong. Waits.
  std::string dispatch_difference() {
    group_.synchronize();
    const internal::PlacementState& placed = *batch_.placed;
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      const int64_t hidden = case_.shape.hidden, rows = placed.padded_rows[rank];
      const std::vector<BFloat16> got = from_device(ranks_[rank].rows.as<BFloat16>(), rows * hidden);
      const std::vector<float> probs = from_device(ranks_[rank].row_probs.as<float>(), rows);
      const std::vector<BFloat16> zeros(static_cast<size_t>(hidden));
      for (int64_t row = 0; row < rows; ++row) {
        const RowSource source = placed.rank[rank].rows[row];
        const BFloat16* expected = source.rank < 0 ? zeros.data() : inputs_[source.rank].data() + source.token * hidden;
        if (std::memcmp(got.data() + row * hidden, expected, static_cast<size_t>(hidden) * 2) != 0 ||
            probs[static_cast<size_t>(row)] != (source.rank < 0 ? 0.0f : source.prob)) {
          return "rank " + std::to_string(rank) + " row " + std::to_string(row) + " of source " +
                 std::to_string(source.rank) + " token " + std::to_string(source.token);
        }
      }
    }
    return "";
  }

  // Straight after a dispatch every block counts all its rows, padding included.
  std::string counter_difference() {
    const Program program(exchange_program(config_, dispatch_, ProgramPart::kDispatch, group_.workers()),
                          batch_.placed);
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      std::string wrong = counter_difference(program.rank(rank));
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  std::string combine_difference() {
    group_.synchronize();
    for (int rank = 0; rank < ranks_of(case_); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      const int64_t hidden = case_.shape.hidden, tokens = case_.tokens[rank], topk = case_.shape.topk;
      const std::vector<BFloat16> got = from_device(ranks_[rank].y.as<BFloat16>(), tokens * hidden);
      const std::vector<float> dprobs = from_device(ranks_[rank].dprobs.as<float>(), tokens * topk);
      std::vector<BFloat16> expected(static_cast<size_t>(hidden));
      for (int64_t token = 0; token < tokens; ++token) {
        expected_sum(rank, token, expected);
        if (std::memcmp(got.data() + token * hidden, expected.data(), expected.size() * 2) != 0) {
          return "rank " + std::to_string(rank) + " token " + std::to_string(token);
        }
        for (int64_t slot = 0; case_.with_dprobs && slot < topk; ++slot) {
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
  // A rank's arrays on its GPU.
  struct RankArrays {
    Buffer ids, probs, x, rows, row_probs, output_rows, row_dprobs, y, dprobs;
  };

  static GroupOptions group_options(const ExchangeCase& c, const std::vector<int>& devices, double timeout_seconds) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = ranks_of(c);
    options.workers = c.workers;
    options.devices = devices;
    options.timeout_seconds = timeout_seconds;
    options.arrival_timeout_seconds = 5 * timeout_seconds;
    return options;
  }

  template <typename T>
  static Buffer uploaded(const std::vector<T>& values) {
    Buffer buffer(static_cast<int64_t>(values.size() * sizeof(T)));
    to_device(buffer.as<T>(), values);
    return buffer;
  }

  Routing add_rank(int rank) {
    const ScopedDevice scope(devices_[rank]);
    const int64_t hidden = case_.shape.hidden, tokens = case_.tokens[rank], topk = case_.shape.topk;
    const int64_t rows = batch_.placed->padded_rows[rank];
    RankArrays& own = ranks_[rank];
    inputs_.push_back(random_values(tokens * hidden, random_));
    outputs_.push_back(random_values(rows * hidden, random_));
    std::vector<float> dprobs(static_cast<size_t>(rows));
    for (float& dprob : dprobs) dprob = static_cast<float>(random_() % 2000) / 1000.0f - 1.0f;
    row_dprobs_.push_back(dprobs);
    own.ids = uploaded(batch_.ids[rank]);
    own.probs = uploaded(batch_.probs[rank]);
    own.x = uploaded(inputs_.back());
    own.output_rows = uploaded(outputs_.back());
    own.row_dprobs = uploaded(dprobs);
    own.rows = Buffer(rows * hidden * 2);
    own.row_probs = Buffer(rows * 4);
    own.y = Buffer(tokens * hidden * 2);
    own.dprobs = Buffer(tokens * topk * 4);
    there_.push_back({own.x.as<BFloat16>(), own.rows.as<BFloat16>(), own.row_probs.as<float>(), {}});
    back_.push_back({own.output_rows.as<BFloat16>(),
                     own.y.as<BFloat16>(),
                     case_.with_dprobs ? own.row_dprobs.as<float>() : nullptr,
                     case_.with_dprobs ? own.dprobs.as<float>() : nullptr,
                     {}});
    return {tokens, own.ids.as<int32_t>(), IndexType::kInt32, own.probs.as<float>(), {}};
  }

  std::string counter_difference(const RankProgram& p) {
    const SignalLayout layout = signal_layout(p);
    const ScopedDevice scope(devices_[p.rank]);
    const auto bank = from_device(engine().counters(p.rank, layout), layout.counter_total);
    for (int32_t expert = 0; expert < p.local_experts; ++expert) {
      const int32_t first = p.block_begin[expert];
      for (int32_t block = first; block < p.block_begin[expert + 1]; ++block) {
        const RowRange range = rows_of_block(p, p.first_expert + expert, block - first);
        const uint32_t full = bank[static_cast<size_t>(layout.counters[static_cast<int>(CounterSpace::kFullRows)]) +
                                   static_cast<size_t>(block)];
        if (full == static_cast<uint32_t>(range.padded_end - range.begin)) continue;
        return "rank " + std::to_string(p.rank) + " block " + std::to_string(block) + " counts " +
               std::to_string(full) + " of " + std::to_string(range.padded_end - range.begin);
      }
    }
    return "";
  }

  // fp32, ascending from +0, rounded once; with groups first inside each group.
  void expected_sum(int rank, int64_t token, std::vector<BFloat16>& expected) {
    const internal::RankPlacement& own = batch_.placed->rank[rank];
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
            outputs_[batch_.placed->rank_of_expert[expert]].data() + own.row_of_slot[token * topk + slot] * hidden;
        for (int64_t i = 0; i < hidden; ++i) target[i] = add(target[i], to_float(row[i]));
      }
      if (case_.groups == 0 || !used) continue;
      for (int64_t i = 0; i < hidden; ++i) sum[i] = add(sum[i], to_float(to_bfloat16(part[i])));
    }
    for (int64_t i = 0; i < hidden; ++i) expected[i] = to_bfloat16(sum[i]);
  }

  float expected_prob_gradient(int rank, int64_t entry) {
    const internal::RankPlacement& own = batch_.placed->rank[rank];
    const int32_t expert = own.expert_of_slot[entry];
    if (expert < 0) return 0.0f;
    return add(0.0f, row_dprobs_[batch_.placed->rank_of_expert[expert]][static_cast<size_t>(own.row_of_slot[entry])]);
  }

  const ExchangeCase case_;
  std::mt19937_64 random_;
  std::vector<int> devices_;
  Batch batch_;
  std::vector<RankArrays> ranks_;  // outlive the group's calls
  Group group_;
  LayerConfig config_;
  Schedule dispatch_, combine_;
  Placement placement_;
  std::vector<DispatchArguments> there_;
  std::vector<CombineArguments> back_;
  std::vector<std::vector<BFloat16>> inputs_, outputs_;
  std::vector<std::vector<float>> row_dprobs_;
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
  c.set("queue", "static");
  c.combine.set("combine.column_chunks", "1");
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
    c.name += ", push, by groups, dprobs";
    c.dispatch.set("dispatch.transport", "push");
    c.groups = ranks_of(c) * (c.shape.experts / ranks_of(c) > 1 ? 2 : 1);
    c.with_dprobs = true;
    c.combine.set("combine.column_chunks", "2");
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
  c.with_dprobs = pick({0, 1}) == 0;
  if (pick({0, 1}) == 0) c.groups = static_cast<int>(experts / pick({1, experts / ranks}));
  if (c.groups > 32) c.groups = 0;
  c.dispatch.set("dispatch.transport", pick({0, 1}) == 0 ? "pull" : "push");
  c.dispatch.set("dispatch.dedup", pick({0, 1}) == 0 ? "on" : "off");
  c.set("order.experts_per_wave", std::to_string(std::min(experts / ranks, pick({1, 2, 5}))));
  c.set("order.source_rotation", pick({0, 1}) == 0 ? "on" : "off");
  c.set("queue", pick({0, 1}) == 0 ? "static" : "dynamic");
  c.combine.set("combine.column_chunks", std::to_string(pick({1, 2, 3, 8})));
  c.workers = static_cast<int>(pick({1, 2, 5, 8}));
  if (pick({0, 1}) == 0) {
    c.dispatch.set("comm.dispatch_sms",
                   std::to_string(1 + static_cast<int>(random() % static_cast<unsigned>(c.workers))));
    c.combine.set("comm.combine_sms",
                  std::to_string(1 + static_cast<int>(random() % static_cast<unsigned>(c.workers))));
  }
  return c;
}

// Rings of other sizes, each a kernel of its own.
struct Rings {
  int dispatch_bytes, dispatch_stages, combine_bytes, combine_stages;
};
constexpr Rings kRings[] = {{1024, 1, 1024, 1}, {512, 16, 512, 16}, {8192, 1, 16384, 2}, {2048, 5, 32768, 1}};

std::vector<ExchangeCase> ring_cases() {
  std::vector<ExchangeCase> cases;
  for (const Rings& rings : kRings) {
    ExchangeCase c =
        basic("rings of " + std::to_string(rings.dispatch_stages) + " x " + std::to_string(rings.dispatch_bytes) +
                  " and " + std::to_string(rings.combine_stages) + " x " + std::to_string(rings.combine_bytes),
              {150, 0, 77, 130}, 2880, 16, 5);
    c.dispatch.set("comm.chunk_bytes", std::to_string(rings.dispatch_bytes));
    c.dispatch.set("comm.stages", std::to_string(rings.dispatch_stages));
    c.combine.set("comm.chunk_bytes", std::to_string(rings.combine_bytes));
    c.combine.set("comm.stages", std::to_string(rings.combine_stages));
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
    exchange.dispatch();
    wrong = exchange.dispatch_difference() + exchange.counter_difference();
    if (!wrong.empty()) wrong = "dispatch: " + wrong;
    exchange.combine();
    const std::string combine = exchange.combine_difference();
    if (!combine.empty()) wrong += " combine: " + combine;
  } catch (const Error& error) {
    wrong = error.what();
  }
  results.record(c.name, wrong.empty(), wrong);
}

// Calls in a row with new epochs, across their wrap, beside copies over PCIe; every hundredth's results are compared.
void run_many(Results& results, const std::vector<int>& devices, int repeats, const char* transport) {
  ExchangeCase c = basic(std::string("many calls, ") + transport, std::vector<int64_t>(devices.size(), 65), 264,
                         static_cast<int64_t>(8 * devices.size()), 4);
  c.groups = static_cast<int>(devices.size());
  c.dispatch.set("dispatch.transport", transport);
  Exchange exchange(c, devices, 5, 20.0);
  exchange.dispatch();
  exchange.combine();
  exchange.engine().set_epoch(0xffffffffu - static_cast<uint32_t>(repeats));
  Traffic traffic(1 + *std::max_element(devices.begin(), devices.end()));
  std::string wrong;
  for (int i = 0; i < repeats && wrong.empty(); ++i) {
    if (i % 100 == 0 || i + 1 == repeats) exchange.poison_results();
    if (i % 200 == 0) traffic.go_on();
    exchange.dispatch();
    exchange.combine();
    if (i % 100 != 0 && i + 1 != repeats) continue;
    wrong = exchange.dispatch_difference() + exchange.combine_difference();
  }
  results.record(c.name + " (" + std::to_string(repeats) + ")", wrong.empty(), wrong);
}

// The last rank of each GPU, which stands for two.
void run_time_out(Results& results, bool spread) {
  const std::vector<int> devices = spread ? std::vector<int>{0, 0, 1, 1} : std::vector<int>{0, 0};
  const ExchangeCase c = basic("a rank that never comes", std::vector<int64_t>(devices.size(), 100), 256, 16, 4);
  Exchange exchange(c, devices, 6, 0.1);
  exchange.dispatch();
  exchange.group().synchronize();
  exchange.engine().leave_out(1);
  std::string message = "no error";
  try {
    exchange.dispatch();
    exchange.group().synchronize();
  } catch (const Error& error) {
    message = error.status() == Status::kTimeout ? error.what() : "another error";
  }
  const bool named = message.find("for rank 1 to arrive") != std::string::npos ||
                     (spread && message.find("for rank 3 to arrive") != std::string::npos);
  results.record(c.name + ": is named", named, message);
  exchange.engine().leave_out(0);
  exchange.group().recover();
  exchange.poison_results();
  exchange.dispatch();
  exchange.combine();
  const std::string wrong = exchange.dispatch_difference() + exchange.combine_difference();
  results.record(c.name + ": works again", wrong.empty(), wrong);
}

// A layer's Schedule for both, among each other's calls.
void run_group(Results& results, const std::vector<int>& devices) {
  GroupExchange exchange({100, 0, 77, 31}, devices, {.hidden = 520, .intermediate = 192, .experts = 16, .topk = 4},
                         {.workers = 8});
  const std::string taken = exchange.taken_unaligned();
  results.record("arrays that are not aligned are refused", taken.empty(), taken);
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
  for (const char* const transport : {"pull", "push"}) {
    run_many(results, devices_for(4, spread), repeats, transport);
  }
  run_time_out(results, spread);
  run_group(results, devices_for(4, spread));
}

// Compiles the kernels of all tests into the cache; needs no GPU.
void compile_all() {
  std::vector<KernelRequest> requests{begin_call_request()};
  std::vector<ExchangeConfig> configs = default_exchange_configs();
  for (const Rings& rings : kRings) {
    configs.push_back(dispatch_config(rings.dispatch_bytes, rings.dispatch_stages));
    configs.push_back(combine_config(rings.combine_bytes, rings.combine_stages));
  }
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
