#include "uniep/c_api.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "support/branch_counts.h"
#include "support/c_layer.h"
#include "uniep/uniep.h"

namespace uniep::test {
namespace {

// z by expert and row without padding, and the rows that the C API gives against those of the C++ API.
void gather_z(const uniep_placement* placement, const uniep_saved* saved, CLayer& layer, const Placement& expected) {
  const int64_t columns = 2 * layer.config.intermediate;
  for (int64_t expert = 0; expert < layer.config.experts; ++expert) {
    const int rank = static_cast<int>(expert * layer.source.ranks / layer.config.experts);
    uniep_expert_rows rows{};
    rows.size = sizeof(rows);
    expect_ok(uniep_placement_expert(placement, expert, &rows));
    EXPECT_EQ(rows.size, sizeof(rows));
    EXPECT_EQ(rows.rows, expected.expert_rows(expert));
    EXPECT_EQ(rows.first_row, expected.expert_segment(expert));
    const void* z = nullptr;
    expect_ok(uniep_saved_z(saved, rank, &z));
    const BFloat16* first = static_cast<const BFloat16*>(z) + rows.first_row * columns;
    if (rows.rows > 0) layer.result.z.insert(layer.result.z.end(), first, first + rows.rows * columns);
  }
  for (int rank = 0; rank < layer.source.ranks; ++rank) {
    uniep_rank_rows rows{};
    rows.size = sizeof(rows);
    expect_ok(uniep_placement_rank(placement, rank, &rows));
    EXPECT_EQ(rows.tokens, expected.tokens(rank));
    EXPECT_EQ(rows.rows, expected.rows(rank));
    EXPECT_EQ(rows.padded_rows, expected.padded_rows(rank));
  }
}

TEST(CApi, GivesTheBitsOfTheSequentialRun) {
  const char* schedules[] = {"auto", "fusion=none", "fusion=pairs,comm.where=sms", R"({"save.xg": "redispatch"})",
                             "combine.transport=staged,dispatch.transport=push"};
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const RandomLayer random = random_layer(seed);
    count_layer(branches, random);
    SCOPED_TRACE(random.description);
    CLayer layer(random);
    const char* schedule = schedules[seed % std::size(schedules)];
    const GroupHandle group = make_group(group_options(random.ranks));
    const PlacementHandle placement = layer.place(group.get());
    const SavedHandle saved = layer.forward(group.get(), placement.get(), schedule);
    ASSERT_NE(saved, nullptr);
    expect_ok(layer.backward(group.get(), saved.get(), schedule));

    GroupOptions options;
    options.ranks = random.ranks;
    Group expected(options);
    const cli::LayerRunner runner(expected, random.config, random.data);
    gather_z(placement.get(), saved.get(), layer, runner.placement());
    ASSERT_EQ(difference(layer.result, run_sequential(random)), "");
  }
  branches.expect_all_taken();
}

std::vector<BFloat16> some_rows(int64_t values, unsigned seed) {
  std::vector<BFloat16> rows;
  for (int64_t i = 0; i < values; ++i) {
    seed = seed * 1664525u + 1013904223u;
    rows.push_back({static_cast<unsigned short>(0x3f00u | (seed >> 24))});
  }
  return rows;
}

// One rank's arrays of an exchange.
struct ExchangeArrays {
  ExchangeArrays(const Placement& placement, const LayerShape& shape, int rank)
      : dispatched(static_cast<std::size_t>(placement.padded_rows(rank) * shape.hidden), BFloat16{0xffff}),
        row_probs(static_cast<std::size_t>(placement.padded_rows(rank)), -7.0f),
        rows(some_rows(placement.padded_rows(rank) * shape.hidden, static_cast<unsigned>(rank))),
        row_dprobs(static_cast<std::size_t>(placement.padded_rows(rank)), 0.25f),
        y(static_cast<std::size_t>(placement.tokens(rank) * shape.hidden), BFloat16{0xffff}),
        dprobs(static_cast<std::size_t>(placement.tokens(rank) * shape.topk), -7.0f) {}

  bool operator==(const ExchangeArrays& other) const {
    const auto equal = [](const auto& a, const auto& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
    };
    return equal(dispatched, other.dispatched) && equal(row_probs, other.row_probs) && equal(y, other.y) &&
           equal(dprobs, other.dprobs);
  }

  std::vector<BFloat16> dispatched;
  std::vector<float> row_probs;
  std::vector<BFloat16> rows;
  std::vector<float> row_dprobs;
  std::vector<BFloat16> y;
  std::vector<float> dprobs;
};

TEST(CApi, DispatchAndCombineGiveTheBitsOfTheCppApi) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    const RandomLayer random = random_layer(seed);
    count_layer(branches, random);
    SCOPED_TRACE(random.description);
    const CLayer layer(random);
    const LayerShape& shape = random.config.shape;
    GroupOptions options;
    options.ranks = random.ranks;
    Group cpp_group(options);
    const cli::LayerRunner runner(cpp_group, random.config, random.data);
    const GroupHandle group = make_group(group_options(random.ranks));
    const PlacementHandle placement = layer.place(group.get());

    std::vector<ExchangeArrays> c, cpp;
    for (int rank = 0; rank < random.ranks; ++rank) c.emplace_back(runner.placement(), shape, rank);
    cpp = c;
    std::vector<uniep_dispatch_arguments> c_dispatch;
    std::vector<uniep_combine_arguments> c_combine;
    std::vector<DispatchArguments> cpp_dispatch;
    std::vector<CombineArguments> cpp_combine;
    for (std::size_t rank = 0; rank < c.size(); ++rank) {
      const void* const x = layer.forward_arguments[rank].x;
      c_dispatch.push_back(
          {sizeof(uniep_dispatch_arguments), x, c[rank].dispatched.data(), c[rank].row_probs.data(), nullptr});
      cpp_dispatch.push_back(
          {static_cast<const BFloat16*>(x), cpp[rank].dispatched.data(), cpp[rank].row_probs.data(), {}});
      c_combine.push_back({sizeof(uniep_combine_arguments), c[rank].rows.data(), c[rank].y.data(),
                           c[rank].row_dprobs.data(), c[rank].dprobs.data(), nullptr});
      cpp_combine.push_back(
          {cpp[rank].rows.data(), cpp[rank].y.data(), cpp[rank].row_dprobs.data(), cpp[rank].dprobs.data(), {}});
    }
    expect_ok(uniep_dispatch(group.get(), &layer.config, "auto", placement.get(), c_dispatch.data(), random.ranks));
    expect_ok(uniep_combine(group.get(), &layer.config, "comm.chunk_bytes=512", placement.get(), c_combine.data(),
                            random.ranks));
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = shape,
                                           .numerics = random.config.numerics,
                                           .machine = cpp_group.machine()});
    dispatch(cpp_group, random.config, schedule, runner.placement(), cpp_dispatch);
    combine(cpp_group, random.config, schedule, runner.placement(), cpp_combine);
    for (std::size_t rank = 0; rank < c.size(); ++rank) EXPECT_TRUE(c[rank] == cpp[rank]) << "rank " << rank;
  }
  branches.expect_all_taken();
}

class CApiErrors : public testing::Test {
 protected:
  CApiErrors() : random(random_layer(3, {{2}, 4, 16, 32})), layer(random), group(make_group(group_options(2))) {
    placement = layer.place(group.get());
    saved = layer.forward(group.get(), placement.get(), "auto");
  }

  uniep_status place(const uniep_layer_config* config, const uniep_routing* routings, int count = 2,
                     const uniep_capacity* capacity = nullptr) {
    uniep_placement* made = placement.get();  // must become null
    const uniep_status status = uniep_place(group.get(), config, routings, count, capacity, &made);
    EXPECT_EQ(made == nullptr, status != UNIEP_OK);
    uniep_placement_destroy(made);
    return status;
  }
  uniep_status forward(const char* schedule, const uniep_forward_arguments* arguments, int count = 2) {
    uniep_saved* made = saved.get();
    const uniep_status status =
        uniep_forward(group.get(), &layer.config, schedule, placement.get(), arguments, count, &made);
    EXPECT_EQ(made == nullptr, status != UNIEP_OK);
    uniep_saved_destroy(made);
    return status;
  }

  RandomLayer random;
  CLayer layer;
  GroupHandle group;
  PlacementHandle placement;
  SavedHandle saved;
};

TEST_F(CApiErrors, EveryNullIsAnInvalidArgumentThatIsNamed) {
  uniep_group* const g = group.get();
  uniep_placement* const p = placement.get();
  const uniep_layer_config* const c = &layer.config;
  const uniep_forward_arguments* const f = layer.forward_arguments.data();
  const uniep_backward_arguments* const b = layer.backward_arguments.data();
  const uniep_group_options options = group_options(2);
  uniep_group_info info{sizeof(info), 0, 0, 0, 0, 0};
  uniep_rank_rows rank_rows{sizeof(rank_rows), 0, 0, 0};
  uniep_expert_rows expert_rows{sizeof(expert_rows), 0, 0};
  uniep_memory_need needs[2] = {{sizeof(needs[0]), 0, 0, 0, 0}, {sizeof(needs[0]), 0, 0, 0, 0}};
  uniep_group* group_out = nullptr;
  uniep_placement* placement_out = nullptr;
  uniep_saved* saved_out = nullptr;
  std::size_t needed = 0;
  char buffer[8];
  const void* z = nullptr;
  const auto refused = [](const char* name, uniep_status status) {
    expect_failure(UNIEP_INVALID_ARGUMENT, std::string(name) + ": null pointer", status);
  };
  refused("options", uniep_group_create(nullptr, &group_out));
  refused("group", uniep_group_create(&options, nullptr));
  refused("group", uniep_group_synchronize(nullptr));
  refused("group", uniep_group_recover(nullptr));
  uniep_symmetric_buffer* buffer_out = nullptr;
  int32_t device = 0;
  void* data = nullptr;
  void* const memory[2] = {buffer, buffer};
  refused("out", uniep_make_unique_id(nullptr));
  refused("group", uniep_group_device(nullptr, 0, &device));
  refused("device", uniep_group_device(g, 0, nullptr));
  refused("group", uniep_symmetric_allocate(nullptr, 1, &buffer_out));
  refused("buffer", uniep_symmetric_allocate(g, 1, nullptr));
  refused("group", uniep_symmetric_register(nullptr, memory, 2, 1, &buffer_out));
  refused("memory", uniep_symmetric_register(g, nullptr, 2, 1, &buffer_out));
  refused("buffer", uniep_symmetric_register(g, memory, 2, 1, nullptr));
  refused("buffer", uniep_symmetric_data(nullptr, 0, &data));
  uniep_symmetric_destroy(nullptr);
  uniep_group_leave(nullptr);
  refused("group", uniep_group_describe(nullptr, &info));
  refused("info", uniep_group_describe(g, nullptr));
  const char* const texts[] = {"auto", "fusion=none"};
  expect_ok(uniep_compile(g, c, UNIEP_FORWARD, texts, 2, 0));  // on cpu nothing
  refused("group", uniep_compile(nullptr, c, UNIEP_FORWARD, texts, 2, 0));
  refused("config", uniep_compile(g, nullptr, UNIEP_FORWARD, texts, 2, 0));
  expect_failure(UNIEP_INVALID_ARGUMENT, "direction: 2", uniep_compile(g, c, 2, texts, 2, 0));
  refused("schedules", uniep_compile(g, c, UNIEP_FORWARD, nullptr, 2, 0));
  expect_failure(UNIEP_INVALID_ARGUMENT, "count: -1", uniep_compile(g, c, UNIEP_FORWARD, texts, -1, 0));
  expect_failure(UNIEP_INVALID_ARGUMENT, "threads: -1", uniep_compile(g, c, UNIEP_FORWARD, texts, 2, -1));
  const char* const wrong[] = {"auto", "order.raster=99"};
  expect_failure(UNIEP_INVALID_ARGUMENT, "order.raster=99", uniep_compile(g, c, UNIEP_FORWARD, wrong, 2, 0));
  refused("group", uniep_schedule_resolve(nullptr, c, UNIEP_FORWARD, "auto", nullptr, 0, &needed));
  refused("config", uniep_schedule_resolve(g, nullptr, UNIEP_FORWARD, "auto", nullptr, 0, &needed));
  refused("schedule", uniep_schedule_resolve(g, c, UNIEP_FORWARD, nullptr, nullptr, 0, &needed));
  refused("buffer", uniep_schedule_resolve(g, c, UNIEP_FORWARD, "auto", nullptr, sizeof(buffer), &needed));
  refused("needed", uniep_schedule_resolve(g, c, UNIEP_FORWARD, "auto", buffer, sizeof(buffer), nullptr));
  refused("group", uniep_tuned_schedules(nullptr, nullptr, nullptr, 0, &needed));
  refused("buffer", uniep_tuned_schedules(g, nullptr, nullptr, sizeof(buffer), &needed));
  refused("needed", uniep_tuned_schedules(g, nullptr, buffer, sizeof(buffer), nullptr));
  refused("group", uniep_place(nullptr, c, layer.routings.data(), 2, nullptr, &placement_out));
  refused("config", uniep_place(g, nullptr, layer.routings.data(), 2, nullptr, &placement_out));
  refused("routings", uniep_place(g, c, nullptr, 2, nullptr, &placement_out));
  refused("placement", uniep_place(g, c, layer.routings.data(), 2, nullptr, nullptr));
  refused("placement", uniep_placement_rank(nullptr, 0, &rank_rows));
  refused("rows", uniep_placement_rank(p, 0, nullptr));
  refused("placement", uniep_placement_expert(nullptr, 0, &expert_rows));
  refused("rows", uniep_placement_expert(p, 0, nullptr));
  refused("group", uniep_query_forward_memory(nullptr, c, "auto", p, 1, needs, 2));
  refused("config", uniep_query_forward_memory(g, nullptr, "auto", p, 1, needs, 2));
  refused("schedule", uniep_query_forward_memory(g, c, nullptr, p, 1, needs, 2));
  refused("placement", uniep_query_forward_memory(g, c, "auto", nullptr, 1, needs, 2));
  refused("needs", uniep_query_forward_memory(g, c, "auto", p, 1, nullptr, 2));
  refused("group", uniep_forward(nullptr, c, "auto", p, f, 2, &saved_out));
  refused("config", uniep_forward(g, nullptr, "auto", p, f, 2, &saved_out));
  refused("schedule", uniep_forward(g, c, nullptr, p, f, 2, &saved_out));
  refused("placement", uniep_forward(g, c, "auto", nullptr, f, 2, &saved_out));
  refused("arguments", uniep_forward(g, c, "auto", p, nullptr, 2, &saved_out));
  refused("saved", uniep_saved_z(nullptr, 0, &z));
  refused("z", uniep_saved_z(saved.get(), 0, nullptr));
  refused("group", uniep_backward(nullptr, c, "auto", saved.get(), b, 2, nullptr));
  refused("config", uniep_backward(g, nullptr, "auto", saved.get(), b, 2, nullptr));
  refused("schedule", uniep_backward(g, c, nullptr, saved.get(), b, 2, nullptr));
  refused("saved", uniep_backward(g, c, "auto", nullptr, b, 2, nullptr));
  refused("arguments", uniep_backward(g, c, "auto", saved.get(), nullptr, 2, nullptr));
  const uniep_dispatch_arguments d[2] = {{sizeof(d[0]), nullptr, nullptr, nullptr, nullptr},
                                         {sizeof(d[0]), nullptr, nullptr, nullptr, nullptr}};
  refused("group", uniep_dispatch(nullptr, c, "auto", p, d, 2));
  refused("config", uniep_dispatch(g, nullptr, "auto", p, d, 2));
  refused("schedule", uniep_dispatch(g, c, nullptr, p, d, 2));
  refused("placement", uniep_dispatch(g, c, "auto", nullptr, d, 2));
  refused("arguments", uniep_dispatch(g, c, "auto", p, nullptr, 2));
  refused("arguments", uniep_combine(g, c, "auto", p, nullptr, 2));
  refused("group", uniep_combine(nullptr, c, "auto", p, nullptr, 2));
  uniep_group_destroy(nullptr);
  uniep_placement_destroy(nullptr);
  uniep_saved_destroy(nullptr);

  // Arrays inside the structures.
  uniep_weights without_w1 = layer.weights[0];
  without_w1.w1 = nullptr;
  uniep_forward_arguments without[2] = {f[0], f[1]};
  for (const uniep_weights* weights : std::initializer_list<const uniep_weights*>{nullptr, &without_w1}) {
    without[0].weights = weights;
    expect_failure(UNIEP_INVALID_ARGUMENT, "w1: null on rank 0", forward("auto", without));
  }
  without_w1.size = 0;
  expect_failure(UNIEP_INVALID_ARGUMENT, "weights.size: 0", forward("auto", without));
}

TEST_F(CApiErrors, ValuesThatAreNoConstantAreRefused) {
  uniep_group_options options = group_options(2);
  options.engine = 3;
  uniep_group* made = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "engine: 3", uniep_group_create(&options, &made));
  options = group_options(65);
  expect_failure(UNIEP_INVALID_ARGUMENT, "ranks: 65", uniep_group_create(&options, &made));
  options = group_options(2);
  options.launch = 2;
  expect_failure(UNIEP_INVALID_ARGUMENT, "launch: 2", uniep_group_create(&options, &made));
  options = group_options(2);
  options.arrival_timeout_seconds = -1;
  expect_failure(UNIEP_INVALID_ARGUMENT, "arrival_timeout_seconds: -1", uniep_group_create(&options, &made));
  for (const double seconds : {-1.0, 1e10, std::numeric_limits<double>::quiet_NaN()}) {
    options = group_options(2);
    options.timeout_seconds = seconds;
    expect_failure(UNIEP_INVALID_ARGUMENT, "at most 1000000 seconds", uniep_group_create(&options, &made));
  }
  options = group_options(2);
  options.device_count = 1;
  expect_failure(UNIEP_INVALID_ARGUMENT, "device_count: 1", uniep_group_create(&options, &made));
  const int32_t devices[] = {0};
  options.devices = devices;
  options.device_count = -1;
  expect_failure(UNIEP_INVALID_ARGUMENT, "device_count: -1", uniep_group_create(&options, &made));
  options.device_count = 0;
  expect_failure(UNIEP_INVALID_ARGUMENT, "device_count: 0", uniep_group_create(&options, &made));
  uniep_routing routings[2] = {layer.routings[0], layer.routings[1]};
  routings[1].index_type = -1;
  expect_failure(UNIEP_INVALID_ARGUMENT, "index_type: -1", place(&layer.config, routings));
  expect_failure(UNIEP_INVALID_ARGUMENT, "count: 1; must be 2", place(&layer.config, layer.routings.data(), 1));
  expect_failure(UNIEP_INVALID_ARGUMENT, "count: -1; must be 2", forward("auto", layer.forward_arguments.data(), -1));
  std::size_t needed = 0;
  const auto resolve_for = [&](const uniep_layer_config& config, int direction) {
    return uniep_schedule_resolve(group.get(), &config, direction, "auto", nullptr, 0, &needed);
  };
  expect_failure(UNIEP_INVALID_ARGUMENT, "direction: 2", resolve_for(layer.config, 2));
  uniep_layer_config config = layer.config;
  config.activation = 5;
  expect_failure(UNIEP_INVALID_ARGUMENT, "activation: 5", resolve_for(config, UNIEP_FORWARD));
  config = layer.config;
  config.weight_gradient = 3;
  expect_failure(UNIEP_INVALID_ARGUMENT, "weight_gradient: 3", resolve_for(config, UNIEP_BACKWARD));
  uniep_rank_rows rows{sizeof(rows), 0, 0, 0};
  expect_failure(UNIEP_INVALID_ARGUMENT, "rank: 2; legal are 0 to 1", uniep_placement_rank(placement.get(), 2, &rows));
  uniep_expert_rows expert{sizeof(expert), 0, 0};
  expect_failure(UNIEP_INVALID_ARGUMENT, "expert: -1", uniep_placement_expert(placement.get(), -1, &expert));
  const void* z = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "rank: -1", uniep_saved_z(saved.get(), -1, &z));
}

TEST_F(CApiErrors, TheStatusOfTheLibraryIsPassedOn) {
  uniep_capacity capacity{sizeof(capacity), 1, 0};
  expect_failure(UNIEP_OVERFLOW, "capacity", place(&layer.config, layer.routings.data(), 2, &capacity));
  capacity = {sizeof(capacity), 1 << 20, random.data.tokens[0] - 1};
  expect_failure(UNIEP_INVALID_ARGUMENT, "capacity.tokens", place(&layer.config, layer.routings.data(), 2, &capacity));
  capacity = {sizeof(capacity), 1 << 20, 1 << 10};
  expect_ok(place(&layer.config, layer.routings.data(), 2, &capacity));
  capacity.size = 16;
  expect_failure(UNIEP_INVALID_ARGUMENT, "capacity.size: 16",
                 place(&layer.config, layer.routings.data(), 2, &capacity));
  uniep_group_options options = group_options(2);
  options.engine = UNIEP_ENGINE_CUDA;
  uniep_group* made = nullptr;
  EXPECT_NE(uniep_group_create(&options, &made) == UNIEP_OK, made == nullptr);
  uniep_group_destroy(made);
  expect_failure(UNIEP_INVALID_ARGUMENT, "fusion", forward("fusion=everything", layer.forward_arguments.data()));
  expect_failure(UNIEP_INVALID_ARGUMENT, "comm.reserve_sms",
                 forward("comm.reserve_sms=100", layer.forward_arguments.data()));
  expect_ok(uniep_group_synchronize(group.get()));
  expect_ok(uniep_group_recover(group.get()));
  expect_ok(forward("auto", layer.forward_arguments.data()));
}

TEST_F(CApiErrors, MessagesBelongToTheirThread) {
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null", uniep_group_recover(nullptr));
  std::thread([] {
    EXPECT_STREQ(uniep_last_error(), "");
    expect_failure(UNIEP_INVALID_ARGUMENT, "options: null", [] {
      uniep_group* made = nullptr;
      return uniep_group_create(nullptr, &made);
    }());
  }).join();
  expect_ok(uniep_group_recover(group.get()));
  EXPECT_STREQ(uniep_last_error(), "group: null pointer");
}

TEST_F(CApiErrors, HandlesMayBeDestroyedInAnyOrder) {
  group.reset();
  uniep_rank_rows rows{sizeof(rows), 0, 0, 0};
  expect_ok(uniep_placement_rank(placement.get(), 1, &rows));
  const void* z = nullptr;
  expect_ok(uniep_saved_z(saved.get(), 0, &z));
  placement.reset();
  saved.reset();
}

// An allocator of a caller that fails in the way asked for.
struct PlannedAllocator {
  enum class Plan { kWork, kNoRoom, kThrowError, kThrowLongError, kThrowBadAlloc, kThrowNumber };
  Plan plan = Plan::kWork;
  int64_t outstanding_bytes = 0;
  std::size_t most_bytes = 0;

  static void* allocate(void* context, std::size_t bytes, std::size_t alignment, int32_t, void*) {
    PlannedAllocator& own = *static_cast<PlannedAllocator*>(context);
    if (own.plan == Plan::kNoRoom) return nullptr;
    if (own.plan == Plan::kThrowError) throw std::runtime_error("planned");
    if (own.plan == Plan::kThrowLongError) throw std::runtime_error(std::string(5000, 'x'));
    if (own.plan == Plan::kThrowBadAlloc) throw std::bad_alloc();
    if (own.plan == Plan::kThrowNumber) throw 7;
    own.outstanding_bytes += bytes;
    own.most_bytes = std::max(own.most_bytes, bytes);
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  static void release(void* context, void* memory, std::size_t bytes, int32_t, void*) {
    static_cast<PlannedAllocator*>(context)->outstanding_bytes -= bytes;
    ::operator delete(memory, std::align_val_t(256));
  }
};

TEST_F(CApiErrors, NoExceptionCrossesTheBorder) {
  using Plan = PlannedAllocator::Plan;
  PlannedAllocator allocator;
  uniep_group_options options = group_options(2);
  options.allocate = PlannedAllocator::allocate;
  options.release = PlannedAllocator::release;
  options.allocator_context = &allocator;
  group = make_group(options);
  placement = layer.place(group.get());
  const uniep_forward_arguments* const arguments = layer.forward_arguments.data();
  allocator.plan = Plan::kNoRoom;
  expect_failure(UNIEP_OUT_OF_MEMORY, "allocator: no room for", forward("auto", arguments));
  allocator.plan = Plan::kThrowBadAlloc;
  expect_failure(UNIEP_OUT_OF_MEMORY, "no room", forward("auto", arguments));
  allocator.plan = Plan::kThrowError;
  expect_failure(UNIEP_INTERNAL, "planned", forward("auto", arguments));
  allocator.plan = Plan::kThrowLongError;
  EXPECT_EQ(forward("auto", arguments), UNIEP_INTERNAL);
  EXPECT_EQ(uniep_last_error(), std::string(4092, 'x') + "...");
  allocator.plan = Plan::kThrowNumber;
  expect_failure(UNIEP_INTERNAL, "unknown type", forward("auto", arguments));
  EXPECT_EQ(allocator.outstanding_bytes, 0);

  allocator.plan = Plan::kWork;
  saved = layer.forward(group.get(), placement.get(), "auto");
  ASSERT_NE(saved, nullptr);
  uniep_memory_need needs[2] = {{sizeof(needs[0]), 0, 0, 0, 0}, {sizeof(needs[0]), 0, 0, 0, 0}};
  expect_ok(uniep_query_forward_memory(group.get(), &layer.config, "auto", placement.get(), 1, needs, 2));
  EXPECT_EQ(allocator.outstanding_bytes, static_cast<int64_t>(needs[0].saved_bytes + needs[1].saved_bytes));
  EXPECT_GT(allocator.outstanding_bytes, 0);
  group.reset();
  saved.reset();
  EXPECT_EQ(allocator.outstanding_bytes, 0);
  options.release = nullptr;
  uniep_group* made = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "allocator", uniep_group_create(&options, &made));
}

TEST_F(CApiErrors, SchedulesComeBackAsJson) {
  const char* const given = "fusion=pairs,tile.n=128";
  GroupOptions options;
  options.ranks = options.workers = 2;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const std::string expected = to_json(resolve(PartialSchedule::parse(given), {.direction = direction,
                                                                                 .shape = random.config.shape,
                                                                                 .numerics = random.config.numerics,
                                                                                 .machine = Group(options).machine()}));
    const auto resolve_into = [&](char* buffer, std::size_t capacity, std::size_t* needed) {
      return uniep_schedule_resolve(group.get(), &layer.config, static_cast<int32_t>(direction), given, buffer,
                                    capacity, needed);
    };
    std::size_t needed = 0;
    expect_ok(resolve_into(nullptr, 0, &needed));
    ASSERT_EQ(needed, expected.size() + 1);
    std::string buffer(needed + 1, '#');
    expect_failure(UNIEP_OVERFLOW, "capacity", resolve_into(buffer.data(), needed - 1, &needed));
    EXPECT_EQ(buffer, std::string(needed + 1, '#'));
    expect_ok(resolve_into(buffer.data(), needed, &needed));
    EXPECT_STREQ(buffer.c_str(), expected.c_str());
    EXPECT_EQ(buffer.back(), '#');
    // What was printed is a schedule again.
    expect_ok(uniep_schedule_resolve(group.get(), &layer.config, static_cast<int32_t>(direction), buffer.c_str(),
                                     nullptr, 0, &needed));
  }
}

TEST_F(CApiErrors, EachCallTakesTheScheduleOfItsDirection) {
  const char* const only_forward = "fusion=none,backward.wgrad=fill";
  const auto backward = [&](const char* schedule) { return layer.backward(group.get(), saved.get(), schedule); };
  const auto query = [&](int direction, const char* schedule) {
    uniep_memory_need needs[2] = {{sizeof(needs[0]), 0, 0, 0, 0}, {sizeof(needs[0]), 0, 0, 0, 0}};
    return direction == UNIEP_FORWARD
               ? uniep_query_forward_memory(group.get(), &layer.config, schedule, placement.get(), 1, needs, 2)
               : uniep_query_backward_memory(group.get(), &layer.config, schedule, placement.get(), 0, 0, needs, 2);
  };
  expect_ok(forward(only_forward, layer.forward_arguments.data()));
  expect_ok(query(UNIEP_FORWARD, only_forward));
  expect_failure(UNIEP_INVALID_ARGUMENT, "illegal schedule: backward.wgrad", backward(only_forward));
  expect_failure(UNIEP_INVALID_ARGUMENT, "illegal schedule: backward.wgrad", query(UNIEP_BACKWARD, only_forward));
}

// One process holds all ranks on the cpu engine, so what other processes are for is checked and refused.
TEST_F(CApiErrors, ProcessesAreOfTheCudaEngine) {
  char id[UNIEP_UNIQUE_ID_BYTES] = {}, other[UNIEP_UNIQUE_ID_BYTES] = {};
  expect_ok(uniep_make_unique_id(id));
  expect_ok(uniep_make_unique_id(other));
  EXPECT_NE(std::memcmp(id, other, sizeof(id)), 0);
  uniep_group_options options = group_options(2);
  options.launch = UNIEP_LAUNCH_PROCESSES;
  options.rank = 1;
  options.unique_id = id;
  uniep_group* made = group.get();
  expect_failure(UNIEP_UNSUPPORTED, "launch: processes", uniep_group_create(&options, &made));
  EXPECT_EQ(made, nullptr);

  options = group_options(2);
  expect_ok(uniep_group_create(&options, &made));
  int32_t device = 0;
  expect_ok(uniep_group_device(made, 1, &device));
  EXPECT_EQ(device, -1);
  expect_failure(UNIEP_INVALID_ARGUMENT, "rank: 2; legal are 0 to 1", uniep_group_device(made, 2, &device));
  uniep_group_leave(made);
  uniep_group_destroy(made);
}

TEST_F(CApiErrors, AnInputMayLieInASymmetricBuffer) {
  const std::size_t bytes = 2 * static_cast<std::size_t>(layer.config.hidden * 16);
  uniep_symmetric_buffer* buffer = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "bytes: 0", uniep_symmetric_allocate(group.get(), 0, &buffer));
  expect_ok(uniep_symmetric_allocate(group.get(), bytes, &buffer));
  const std::vector<BFloat16> expected = layer.result.y;
  std::vector<uniep_forward_arguments> arguments = layer.forward_arguments;
  for (int32_t rank = 0; rank < 2; ++rank) {
    void* data = nullptr;
    expect_ok(uniep_symmetric_data(buffer, rank, &data));
    const std::size_t used = static_cast<std::size_t>(layer.routings[rank].tokens * layer.config.hidden) * 2;
    ASSERT_LE(used, bytes);
    EXPECT_EQ(std::string_view(static_cast<const char*>(data), bytes), std::string(bytes, '\0'));
    if (used > 0) std::memcpy(data, arguments[rank].x, used);
    arguments[rank].x = data;
  }
  void* data = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "rank: -1", uniep_symmetric_data(buffer, -1, &data));
  layer.result.y.assign(expected.size(), BFloat16{0xffff});
  expect_ok(forward("auto", arguments.data()));
  EXPECT_EQ(std::memcmp(layer.result.y.data(), expected.data(), expected.size() * sizeof(BFloat16)), 0);

  void* const memory[2] = {const_cast<void*>(arguments[0].x), const_cast<void*>(arguments[1].x)};
  uniep_symmetric_buffer* registered = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "count: 1; must be 2",
                 uniep_symmetric_register(group.get(), memory, 1, bytes, &registered));
  expect_failure(UNIEP_INVALID_ARGUMENT, "bytes: 0", uniep_symmetric_register(group.get(), memory, 2, 0, &registered));
  expect_ok(uniep_symmetric_register(group.get(), memory, 2, bytes, &registered));
  expect_ok(uniep_symmetric_data(registered, 1, &data));
  EXPECT_EQ(data, memory[1]);
  group.reset();  // handles go in any order
  uniep_symmetric_destroy(registered);
  uniep_symmetric_destroy(buffer);
}

TEST(CApi, NamesAndVersion) {
  for (int status = 0; status <= 8; ++status) {
    EXPECT_STREQ(uniep_status_name(status), status_name(static_cast<Status>(status)));
  }
  EXPECT_STREQ(uniep_status_name(9), "unknown");
  EXPECT_STREQ(uniep_status_name(-1), "unknown");
  EXPECT_EQ(uniep_version(), UNIEP_VERSION);
  EXPECT_STREQ(uniep_version_string(), UNIEP_VERSION_STRING);
}

}  // namespace
}  // namespace uniep::test
