// Placement on the GPU against the host's, byte by byte: tables of the placement and of the Program, for virtual ranks
// on one GPU; illegal routings, overflow, a rank that never comes, CUDA graphs, many placements in a row; and its time.
// Exit status 77 without a GPU.
// Usage: gpu_place_tests [--verbose] [--repeats N]
#include <cmath>
#include <cstdlib>
#include <functional>
#include <set>

#include "program/build.h"
#include "tests/cuda/graph_functions.h"
#include "tests/cuda/place_fixture.h"

namespace uniep::cuda::test {
namespace {

using StatePointer = std::shared_ptr<const internal::PlacementState>;

std::vector<HostRouting> random_routings(const PlaceCase& c, std::mt19937_64& random) {
  std::vector<HostRouting> routings;
  for (size_t rank = 0; rank < c.tokens.size(); ++rank) {
    routings.push_back(random_routing(c, static_cast<int>(rank), random));
  }
  return routings;
}

StatePointer place_on_host(const PlaceCase& c, const std::vector<HostRouting>& routings, int64_t capacity = 0) {
  return uniep::place_on_host(PlaceGroup::shape_of(c), static_cast<int>(c.tokens.size()), host_views(c, routings),
                              Capacity{capacity});
}

int64_t sources_of(const PlaceCase& c) {
  int64_t tokens = 0;
  for (const int64_t count : c.tokens) tokens += count;
  return tokens * c.topk;
}

int64_t largest(const std::vector<int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

// A Program's tables, and what follows from them in the RankCalls.
std::string compare_programs(PlaceGroup& group, const PlaceCase& c, const StatePointer& host, PlacedOnDevice& placed,
                             std::mt19937_64& random) {
  const auto pick = [&](int count) { return static_cast<int>(random() % static_cast<uint64_t>(count)); };
  ProgramRequest request;
  request.shape = PlaceGroup::shape_of(c);
  request.direction = pick(2) == 0 ? Direction::kForward : Direction::kBackward;
  request.redispatch = request.direction == Direction::kBackward && pick(2) == 0;
  request.workers = 16;
  request.cluster = 1 + pick(2);
  request.schedule.order.source_rotation = pick(2) == 0;
  request.schedule.order.experts_per_wave = 1 + pick(3);
  if (pick(2) == 0) request.schedule.order.experts = ExpertOrder::kHeavyFirst;
  if (pick(3) == 0) {
    request.schedule.order.experts_per_wave = 1;
    request.schedule.order.blocks_per_wave = 1 << pick(3);
  }
  request.schedule.tile.m = pick(4) == 0 ? 64 : 128;
  if (pick(2) == 0) {
    request.schedule.comm.where = CommWhere::kSms;
    request.schedule.comm.dispatch_sms = 4;
    if (pick(2) == 0) {
      request.schedule.dispatch.transport = DispatchTransport::kPush;
      request.schedule.comm.relay_sms = 2;
    }
  }
  const Program program(request, host);
  const size_t ranks = c.tokens.size();
  std::vector<RankCall> calls(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    RankCall& call = calls[rank];
    std::memset(static_cast<void*>(&call), 0, sizeof(call));
    call.program = program.rank(static_cast<int>(rank));
    call.hidden = request.shape.hidden;
    call.intermediate = request.shape.intermediate;
    RankProgram& p = call.program;
    p.tokens = p.most_blocks = p.most_token_blocks = -1;
    p.late_position = -1;
    const PlacementTables& tables = placed.ranks[rank].tables;
    const ProgramTables& own = placed.programs[rank];
    p.rank_of_expert = tables.rank_of_expert;
    p.counts = tables.counts;
    p.source_offset = tables.source_offset;
    p.expert_rows = tables.expert_rows;
    p.segment_start = tables.segment_start;
    p.token_block_begin = tables.token_block_begin;
    p.tokens_of_rank = tables.tokens_of_rank;
    p.block_begin = own.block_begin;
    p.odd_blocks = own.odd_blocks;
    p.local_of_turn = own.local_of_turn;
    p.turn_of_local = own.turn_of_local;
    p.blocks_before = own.blocks_before;
    p.spans_before = own.spans_before;
    p.rotation = own.rotation;
    p.expert_block = own.expert_block;
    p.blocks_of_rank = own.blocks_of_rank;
    p.push_begin = own.push_begin;
    p.push_block = own.push_block;
  }
  // The calls of a device's ranks follow each other in its memory.
  std::vector<Buffer> memory;
  std::vector<RankCall*> addresses(ranks);
  std::vector<Stream> streams;
  for (const RankToPlace& own : placed.ranks) streams.push_back(own.routing.stream);
  for (const int device : std::set<int>(group.devices().begin(), group.devices().end())) {
    const ScopedDevice scope(device);
    std::vector<RankCall> own;
    memory.emplace_back(static_cast<int64_t>(ranks * sizeof(RankCall)));
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (group.devices()[rank] != device) continue;
      addresses[rank] = memory.back().as<RankCall>() + own.size();
      own.push_back(calls[rank]);
    }
    memory.back().upload(own);
  }
  group.placer().build_programs(addresses, placed.programs, streams);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const ScopedDevice scope(group.devices()[rank]);
    auto* const stream = static_cast<CUstream>(streams[rank].handle);
    check(driver().cuMemcpyDtoHAsync(&calls[rank], reinterpret_cast<CUdeviceptr>(addresses[rank]), sizeof(RankCall),
                                     stream),
          "reading a call");
    check(driver().cuStreamSynchronize(stream), "building a Program's tables");
  }
  TableComparison comparison;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const RankProgram& p = program.rank(static_cast<int>(rank));
    const RankProgram& seen = calls[rank].program;
    const std::string at = "program" + std::to_string(rank) + ".";
    const auto table = [&](const std::string& name, const int32_t* device, const int32_t* expected, int64_t count) {
      comparison.expect(at + name, device, expected, static_cast<size_t>(count));
    };
    table("tokens_of_rank", seen.tokens_of_rank, p.tokens_of_rank, p.ranks);
    table("token_block_begin", seen.token_block_begin, p.token_block_begin, p.ranks + 1);
    table("block_begin", seen.block_begin, p.block_begin, p.local_experts + 1);
    table("local_of_turn", seen.local_of_turn, p.local_of_turn, p.experts);
    table("turn_of_local", seen.turn_of_local, p.turn_of_local, p.local_experts);
    table("blocks_before", seen.blocks_before, p.blocks_before, p.local_experts + 1);
    table("spans_before", seen.spans_before, p.spans_before, p.local_experts + 1);
    table("odd_blocks", seen.odd_blocks, p.odd_blocks, p.local_experts + 1);
    table("rotation", seen.rotation, p.rotation, p.local_experts);
    table("expert_block", seen.expert_block, p.expert_block, p.experts);
    table("blocks_of_rank", seen.blocks_of_rank, p.blocks_of_rank, p.ranks);
    table("push_begin", seen.push_begin, p.push_begin, p.experts + 1);
    table("push_block", seen.push_block, p.push_block, p.experts);
    const SignalLayout layout = signal_layout(p);
    if (seen.tokens != p.tokens || seen.most_blocks != p.most_blocks || seen.late_position != p.late_position ||
        seen.most_token_blocks != p.most_token_blocks ||
        std::memcmp(&calls[rank].layout, &layout, sizeof(layout)) != 0) {
      comparison.different += " " + at + "numbers";
    }
  }
  return comparison.different;
}

// Exact mode, then capacity mode, each into poisoned memory.
void run_case(Results& results, PlaceDevices& gpus, const PlaceCase& c, const std::vector<int>& devices,
              uint64_t seed) {
  std::mt19937_64 random(seed);
  const LayerShape shape = PlaceGroup::shape_of(c);
  const std::vector<HostRouting> routings = random_routings(c, random);
  const StatePointer host = place_on_host(c, routings);
  const int64_t capacity = largest(host->padded_rows);
  for (const bool copies : {false, true}) {
    PlaceGroup group(devices, gpus, copies, capacity * static_cast<int64_t>(sizeof(RowSource)));
    std::string different;
    {
      PlacedOnDevice placed;
      group.upload(c, routings, placed);
      group.placer().count(shape, placed.ranks);
      const PlacementCounts counts = group.placer().read_counts(shape, placed.ranks);
      if (counts.counts != host->counts || counts.tokens != c.tokens) different += " counts on the host";
      group.take_rows(placed, host->padded_rows, sources_of(c));
      group.placer().assign(shape, placed.ranks);
      group.placer().invert_rows(shape, placed.ranks);
      group.placer().check(placed.ranks);
      TableComparison comparison;
      comparison.expect_placement(*host, placed.ranks, true);
      different += comparison.different + compare_programs(group, c, host, placed, random);
    }
    results.record(c.name + (copies ? ", exact, copied rows" : ", exact"), different.empty(), different);
    {
      PlacedOnDevice placed;
      group.upload(c, routings, placed);
      group.take_rows(placed, std::vector<int64_t>(c.tokens.size(), capacity), sources_of(c));
      group.placer().place(shape, placed.ranks, {.rows = capacity});
      group.placer().invert_rows(shape, placed.ranks);
      group.placer().check(placed.ranks);
      TableComparison comparison;
      comparison.expect_placement(*host, placed.ranks, true);
      different = comparison.different + compare_programs(group, c, host, placed, random);
    }
    results.record(c.name + (copies ? ", capacity, copied rows" : ", capacity"), different.empty(), different);
  }
}

std::vector<PlaceCase> all_cases() {
  std::vector<PlaceCase> cases = {
      {"one rank", 8, 2, {100}, Spread::kUniform, false, 0},
      {"one rank, one expert, top-1", 1, 1, {333}, Spread::kUniform, true, 0},
      {"no tokens at all", 16, 4, {0, 0}, Spread::kUniform, false, 0},
      {"all slots unused", 16, 4, {50, 70}, Spread::kUniform, true, 1.0},
      {"two ranks, one of them empty", 16, 4, {0, 129}, Spread::kSkewed, false, 0.1},
      {"one local expert", 8, 3, {31, 32, 33, 0, 1, 257, 64, 100}, Spread::kUniform, true, 0.2},
      {"top-64", 128, 64, {40, 77, 0, 130}, Spread::kUniform, false, 0.05},
      {"all to the same experts", 64, 8, {500, 511, 513, 700}, Spread::kSameExperts, true, 0},
      {"most experts", 2048, 8, {300, 200, 100, 0, 50, 60, 70, 80}, Spread::kUniform, false, 0.1},
      {"1000 experts, skewed", 1000, 6, {900, 1000, 1100, 64}, Spread::kSkewed, true, 0},
      {"8 ranks, 4096 tokens, skewed", 256, 8, std::vector<int64_t>(8, 4096), Spread::kSkewed, false, 0.02},
      {"8 ranks, 8192 tokens, top-8 of 256", 256, 8, std::vector<int64_t>(8, 8192), Spread::kUniform, true, 0},
      {"one rank, 40000 tokens", 128, 8, {40000}, Spread::kSkewed, true, 0},
  };
  std::mt19937_64 random(7);
  const auto pick = [&](int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); };
  for (int i = 0; i < 40; ++i) {
    const int64_t ranks = int64_t{1} << pick(4);
    PlaceCase c;
    c.experts = ranks * (1 + pick(24));
    c.topk = 1 + pick(std::min<int64_t>(c.experts, 12));
    for (int64_t rank = 0; rank < ranks; ++rank) c.tokens.push_back(pick(5) == 0 ? 0 : pick(700));
    c.spread = static_cast<Spread>(pick(3));
    c.wide = pick(2) == 0;
    c.unused = pick(2) == 0 ? 0 : 0.3;
    c.name = "random " + std::to_string(i) + " (W " + std::to_string(ranks) + ", E " + std::to_string(c.experts) +
             ", K " + std::to_string(c.topk) + ")";
    cases.push_back(c);
  }
  return cases;
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return std::to_string(static_cast<int>(error.status())) + " " + error.what();
  }
  return "no error";
}

// The same words as the host's, on the first problem; and an empty placement behind it.
void run_illegal(Results& results, PlaceDevices& gpus) {
  std::mt19937_64 random(3);
  PlaceCase c{"", 16, 4, {200, 3000, 100, 0}, Spread::kUniform, true, 0.1};
  const LayerShape shape = PlaceGroup::shape_of(c);
  PlaceGroup group(std::vector<int>(4, 0), gpus, false);
  for (int kind = 0; kind < 30; ++kind) {
    c.wide = kind % 2 == 0;
    std::vector<HostRouting> routings = random_routings(c, random);
    for (int i = 0; i < 1 + kind % 5; ++i) {
      HostRouting& routing = routings[random() % 3];
      const size_t entry = random() % routing.ids.size();
      switch (random() % 4) {
        case 0:
          routing.ids[entry] = 16 + static_cast<int64_t>(random() % 3);
          break;
        case 1:
          routing.ids[entry] = -2;
          break;
        case 2:
          routing.ids[entry] = 5;
          routing.probs[entry] = kind % 3 == 0 ? INFINITY : -NAN;
          break;
        default:
          routing.ids[entry - entry % 4] = routing.ids[entry - entry % 4 + 3] = 7;
      }
      routing.narrow_ids.assign(routing.ids.begin(), routing.ids.end());
    }
    const std::string expected = message_of([&] { place_on_host(c, routings); });
    PlacedOnDevice placed;
    group.upload(c, routings, placed);
    group.take_rows(placed, std::vector<int64_t>(4, 16 * 1024), sources_of(c));
    const std::string exact = message_of([&] {
      group.placer().count(shape, placed.ranks);
      group.placer().read_counts(shape, placed.ranks);
    });
    const std::string capacity = message_of([&] {
      group.placer().place(shape, placed.ranks, {.rows = 16 * 1024});
      group.placer().check(placed.ranks);
    });
    const bool good = exact == expected && capacity == expected;
    results.record("illegal routing " + std::to_string(kind), good, good ? expected : exact + " | " + expected);
    PlaceCase empty = c;
    std::vector<HostRouting> unused = routings;
    for (HostRouting& routing : unused) {
      std::fill(routing.ids.begin(), routing.ids.end(), -1);
      std::fill(routing.narrow_ids.begin(), routing.narrow_ids.end(), -1);
    }
    const StatePointer host = place_on_host(empty, unused);
    TableComparison comparison;
    comparison.expect_placement(*host, placed.ranks, false);
    results.record("empty placement behind it", comparison.different.empty(), comparison.different);
  }
}

void run_overflow(Results& results, PlaceDevices& gpus) {
  std::mt19937_64 random(5);
  const PlaceCase c{"", 32, 4, {700, 900, 800, 600}, Spread::kSkewed, false, 0.1};
  const LayerShape shape = PlaceGroup::shape_of(c);
  const std::vector<HostRouting> routings = random_routings(c, random);
  const StatePointer host = place_on_host(c, routings);
  PlaceGroup group(std::vector<int>(4, 0), gpus, false);
  PlacedOnDevice placed;
  group.upload(c, routings, placed);
  const int64_t need = largest(host->padded_rows);
  group.take_rows(placed, std::vector<int64_t>(4, need), sources_of(c));
  for (const int64_t capacity : {need, need - 128, need / 2, int64_t{128}}) {
    const std::string expected = message_of([&] { place_on_host(c, routings, capacity); });
    const std::string seen = message_of([&] {
      group.placer().place(shape, placed.ranks, {.rows = capacity});
      group.placer().check(placed.ranks);
    });
    results.record("capacity " + std::to_string(capacity) + " of " + std::to_string(need), seen == expected,
                   seen == expected ? seen : seen + " | " + expected);
  }
}

void run_missing_rank(Results& results, PlaceDevices& gpus) {
  std::mt19937_64 random(6);
  const PlaceCase c{"", 8, 2, {100, 100}, Spread::kUniform, false, 0};
  const LayerShape shape = PlaceGroup::shape_of(c);
  const std::vector<HostRouting> routings = random_routings(c, random);
  PlaceGroup group(std::vector<int>(2, 0), gpus, true, 16 * 1024 * 16);
  HalfMemory half(group.memory(), 0);
  Placer alone(half, {&gpus.kernels(0)}, 0.2, 0.2);
  alone.set_row_inbox(group.inbox());
  PlacedOnDevice placed;
  group.upload(c, routings, placed);
  group.take_rows(placed, {16 * 1024, 16 * 1024}, sources_of(c));
  const std::vector<RankToPlace> first(placed.ranks.begin(), placed.ranks.begin() + 1);
  const std::string message = message_of([&] {
    alone.place(shape, first, {.rows = 16 * 1024});
    alone.check(first);
  });
  results.record("a rank that never comes", message.find("for the counts of rank 1") != std::string::npos, message);
  group.placer().clear();
  group.placer().place(shape, placed.ranks, {.rows = 16 * 1024});
  const std::string after = message_of([&] { group.placer().check(placed.ranks); });
  TableComparison comparison;
  comparison.expect_placement(*place_on_host(c, routings), placed.ranks, false);
  results.record("a placement after it", after == "no error" && comparison.different.empty(),
                 after + comparison.different);
}

// Two placements at a time, so that one stays valid while the next is made.
void run_repeats(Results& results, PlaceDevices& gpus, int repeats) {
  std::mt19937_64 random(8);
  const PlaceCase c{"", 64, 8, {600, 512, 0, 700, 100, 640, 333, 1}, Spread::kSkewed, true, 0.1};
  const LayerShape shape = PlaceGroup::shape_of(c);
  PlaceGroup group(std::vector<int>(8, 0), gpus, false);
  constexpr int64_t kCapacity = 24 * 1024;
  std::vector<PlacedOnDevice> placed(2);
  std::vector<StatePointer> hosts;
  for (PlacedOnDevice& each : placed) {
    const std::vector<HostRouting> routings = random_routings(c, random);
    hosts.push_back(place_on_host(c, routings));
    group.upload(c, routings, each);
    group.take_rows(each, std::vector<int64_t>(8, kCapacity), sources_of(c));
  }
  std::string different;
  for (int i = 0; i < repeats && different.empty(); i += 2) {
    for (const PlacedOnDevice& each : placed) group.placer().place(shape, each.ranks, {.rows = kCapacity});
    group.placer().check(placed[0].ranks);
    for (size_t which = 0; which < 2; ++which) {
      TableComparison comparison;
      comparison.expect_placement(*hosts[which], placed[which].ranks, false);
      different += comparison.different;
      for (const RankToPlace& own : placed[which].ranks) {
        check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(own.tables.rows), 0xee,
                                       kCapacity * sizeof(RowSource), nullptr),
              "poisoning");
      }
      check(driver().cuCtxSynchronize(), "poisoning");
    }
  }
  results.record(std::to_string(repeats) + " placements, two at a time", different.empty(), different);
}

// A captured placement follows new routings.
void run_graph(Results& results, PlaceDevices& gpus) {
  const GraphFunctions graphs;
  std::mt19937_64 random(9);
  const PlaceCase c{"", 32, 4, {500, 400, 300, 200}, Spread::kSkewed, true, 0.1};
  const LayerShape shape = PlaceGroup::shape_of(c);
  PlaceGroup group(std::vector<int>(4, 0), gpus, false);
  PlacedOnDevice placed;
  group.upload(c, random_routings(c, random), placed);
  group.take_rows(placed, std::vector<int64_t>(4, 8192), sources_of(c));
  group.placer().place(shape, placed.ranks, {.rows = 8192});
  group.placer().invert_rows(shape, placed.ranks);
  check(driver().cuStreamSynchronize(group.stream()), "placement");
  CUgraph graph = nullptr;
  CUgraphExec executable = nullptr;
  check(graphs.begin_capture(group.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  group.placer().place(shape, placed.ranks, {.rows = 8192});
  group.placer().invert_rows(shape, placed.ranks);
  check(graphs.end_capture(group.stream(), &graph), "cuStreamEndCapture");
  check(graphs.instantiate(&executable, graph, 0), "cuGraphInstantiateWithFlags");
  std::string different;
  for (int replay = 0; replay < 20; ++replay) {
    const std::vector<HostRouting> routings = random_routings(c, random);
    for (size_t rank = 0; rank < 4; ++rank) {
      const Routing& own = placed.ranks[rank].routing;
      check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(own.topk_ids), routings[rank].ids.data(),
                                       routings[rank].ids.size() * 8, group.stream()),
            "new ids");
      check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(own.probs), routings[rank].probs.data(),
                                       routings[rank].probs.size() * 4, group.stream()),
            "new probs");
    }
    check(graphs.launch(executable, group.stream()), "cuGraphLaunch");
    group.placer().check(placed.ranks);
    TableComparison comparison;
    comparison.expect_placement(*place_on_host(c, routings), placed.ranks, true);
    different += comparison.different;
  }
  results.record("20 replays of a graph with new routings", different.empty(), different);
}

// Microseconds a placement, from ids to tables, back to back on one stream.
void measure(PlaceDevices& gpus, const PlaceCase& c, const std::vector<int>& devices) {
  std::mt19937_64 random(10);
  const LayerShape shape = PlaceGroup::shape_of(c);
  PlaceGroup group(devices, gpus, false);
  const std::vector<HostRouting> routings = random_routings(c, random);
  const StatePointer host = place_on_host(c, routings);
  const int64_t capacity = largest(host->padded_rows);
  PlacedOnDevice placed;
  group.upload(c, routings, placed);
  group.take_rows(placed, std::vector<int64_t>(c.tokens.size(), capacity), sources_of(c));
  const auto microseconds = [&](const std::function<void()>& action) {
    constexpr int kRuns = 200;
    CUevent events[2] = {};
    for (CUevent& event : events) check(driver().cuEventCreate(&event, CU_EVENT_DEFAULT), "cuEventCreate");
    for (int i = 0; i < 20; ++i) action();
    check(driver().cuEventRecord(events[0], group.stream()), "cuEventRecord");
    for (int i = 0; i < kRuns; ++i) action();
    check(driver().cuEventRecord(events[1], group.stream()), "cuEventRecord");
    check(driver().cuEventSynchronize(events[1]), "cuEventSynchronize");
    float milliseconds = 0;
    check(driver().cuEventElapsedTime(&milliseconds, events[0], events[1]), "cuEventElapsedTime");
    return milliseconds * 1000 / kRuns;
  };
  const double whole = microseconds([&] { group.placer().place(shape, placed.ranks, {.rows = capacity}); });
  const double count = microseconds([&] { group.placer().count(shape, placed.ranks); });
  const double assign = microseconds([&] { group.placer().assign(shape, placed.ranks); });
  const double invert = microseconds([&] { group.placer().invert_rows(shape, placed.ranks); });
  group.placer().check(placed.ranks);
  std::printf("%-44s placed in %6.1f us; count %5.1f, assign %5.1f, row_of_source %5.1f\n", c.name.c_str(), whole,
              count, assign, invert);
}

int run(int argc, char** argv) {
  Results results;
  int repeats = 1000;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    if (std::strcmp(argv[i], "--repeats") == 0 && i + 1 < argc) repeats = std::atoi(argv[++i]);
  }
  const ScopedDevice scope(0);
  PlaceDevices gpus;
  const int count = std::min(device_count(), kMaxCudaRanks);
  uint64_t seed = 1;
  for (const PlaceCase& c : all_cases()) {
    run_case(results, gpus, c, std::vector<int>(c.tokens.size(), 0), seed++);
    if (count > 1 && c.tokens.size() > 1) {  // a GPU each as far as they go
      std::vector<int> devices;
      for (size_t rank = 0; rank < c.tokens.size(); ++rank) devices.push_back(static_cast<int>(rank) % count);
      run_case(results, gpus, c, devices, seed++);
    }
  }
  run_illegal(results, gpus);
  run_overflow(results, gpus);
  run_missing_rank(results, gpus);
  run_graph(results, gpus);
  run_repeats(results, gpus, repeats);
  for (const int64_t tokens : {4096, 8192}) {
    const auto timed = [&](const std::string& name, const std::vector<int>& devices) {
      measure(gpus,
              {name + ", T " + std::to_string(tokens) + ", K 8, E 256", 256, 8,
               std::vector<int64_t>(devices.size(), tokens), Spread::kUniform, true, 0},
              devices);
    };
    timed("1 rank", {0});
    timed("8 ranks on one GPU", std::vector<int>(8, 0));
    std::vector<int> each;
    for (int device = 0; device < count; ++device) each.push_back(device);
    if (count > 1) timed(std::to_string(count) + " ranks, a GPU each", each);
  }
  std::printf("placement tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
