#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "support/branch_counts.h"
#include "support/c_layer.h"

// Memory that the caller has for a call, saved states of it, and forwards that keep nothing, through the C API.
namespace uniep::test {
namespace {

// Memory of a caller that aligns to no more than is asked for, with bytes behind it that must stay as they are.
class Bytes {
 public:
  explicit Bytes(std::size_t bytes) : bytes_(bytes), storage_(bytes + 3 * UNIEP_MEMORY_ALIGNMENT, std::byte{0xff}) {
    auto address = reinterpret_cast<uintptr_t>(storage_.data());
    address += UNIEP_MEMORY_ALIGNMENT - address % UNIEP_MEMORY_ALIGNMENT;
    if (address % (2 * UNIEP_MEMORY_ALIGNMENT) == 0) address += UNIEP_MEMORY_ALIGNMENT;
    data_ = reinterpret_cast<std::byte*>(address);
  }
  Bytes(const Bytes& other) : Bytes(other.bytes_) { std::memcpy(data_, other.data_, bytes_); }
  Bytes& operator=(const Bytes&) = delete;

  void* data() const { return data_; }
  uniep_caller_memory given() const { return {data_, bytes_}; }
  std::size_t size() const { return bytes_; }
  bool kept_its_border() const {
    const std::byte* const end = storage_.data() + storage_.size();
    for (const std::byte* byte = data_ + bytes_; byte < end; ++byte) {
      if (*byte != std::byte{0xff}) return false;
    }
    return true;
  }

 private:
  std::size_t bytes_;
  std::vector<std::byte> storage_;
  std::byte* data_ = nullptr;
};

void* refuse_to_allocate(void*, std::size_t, std::size_t, int32_t, void*) {
  return nullptr;
}
void release_nothing(void*, void*, std::size_t, int32_t, void*) {
  std::abort();
}

// A layer on a group whose allocator has no room: all memory is the caller's.
struct OwnMemory {
  explicit OwnMemory(const RandomLayer& random) : layer(random), ranks(random.ranks) {
    uniep_group_options options = group_options(ranks);
    options.allocate = refuse_to_allocate;
    options.release = release_nothing;
    group = make_group(options);
    placement = layer.place(group.get());
  }

  std::vector<uniep_memory_need> needs(int32_t keep_saved) const {
    std::vector<uniep_memory_need> needs(static_cast<std::size_t>(ranks), {sizeof(uniep_memory_need), 0, 0, 0, 0});
    expect_ok(uniep_query_forward_memory(group.get(), &layer.config, schedule, placement.get(), keep_saved,
                                         needs.data(), ranks));
    return needs;
  }
  std::vector<uniep_memory_need> backward_needs(int32_t time, int32_t last_use) const {
    std::vector<uniep_memory_need> needs(static_cast<std::size_t>(ranks), {sizeof(uniep_memory_need), 0, 0, 0, 0});
    expect_ok(uniep_query_backward_memory(group.get(), &layer.config, schedule, placement.get(), time, last_use,
                                          needs.data(), ranks));
    return needs;
  }

  // A forward in memory of exactly the sizes that were asked for.
  uniep_status forward(int32_t keep_saved) {
    saved_memory.clear();
    workspace.clear();
    for (const uniep_memory_need& need : needs(keep_saved)) {
      saved_memory.emplace_back(need.saved_bytes);
      workspace.emplace_back(need.workspace_bytes);
    }
    std::vector<uniep_forward_arguments> arguments = layer.forward_arguments;
    for (std::size_t rank = 0; rank < arguments.size(); ++rank) {
      arguments[rank].saved_memory = saved_memory[rank].given();
      arguments[rank].workspace_memory = workspace[rank].given();
    }
    uniep_saved* made = nullptr;
    const uniep_status status = uniep_forward(group.get(), &layer.config, schedule, placement.get(), arguments.data(),
                                              ranks, keep_saved != 0 ? &made : nullptr);
    saved.reset(made);
    for (const Bytes& memory : workspace) EXPECT_TRUE(memory.kept_its_border());
    for (const Bytes& memory : saved_memory) EXPECT_TRUE(memory.kept_its_border());
    return status;
  }

  uniep_status attach(const std::vector<Bytes>& from, const uniep_placement* on) {
    std::vector<uniep_caller_memory> memory;
    for (const Bytes& own : from) memory.push_back({own.size() == 0 ? nullptr : own.data(), own.size()});
    uniep_saved* made = nullptr;
    const uniep_status status =
        uniep_saved_attach(group.get(), &layer.config, schedule, on, memory.data(), ranks, &made);
    saved.reset(made);
    return status;
  }

  uniep_status backward(int32_t time, int32_t last_use) {
    workspace.clear();
    pending_memory.clear();
    for (const uniep_memory_need& need : backward_needs(time, last_use)) {
      workspace.emplace_back(need.workspace_bytes);
      pending_memory.emplace_back(need.pending_bytes);
    }
    std::vector<uniep_backward_arguments> arguments = layer.backward_arguments;
    for (std::size_t rank = 0; rank < arguments.size(); ++rank) {
      arguments[rank].weight_gradients = time;
      arguments[rank].last_use = last_use;
      arguments[rank].workspace_memory = workspace[rank].given();
      arguments[rank].pending_memory = pending_memory[rank].given();
    }
    uniep_pending* made = nullptr;
    const uniep_status status =
        uniep_backward(group.get(), &layer.config, schedule, saved.get(), arguments.data(), ranks, &made);
    pending.reset(made);
    for (const Bytes& memory : workspace) EXPECT_TRUE(memory.kept_its_border());
    for (const Bytes& memory : pending_memory) EXPECT_TRUE(memory.kept_its_border());
    return status;
  }

  uniep_status make_gradients() {
    const std::vector<uniep_weight_gradient_arguments> gradients = layer.gradient_arguments();
    return uniep_make_weight_gradients(group.get(), pending.get(), gradients.data(), ranks);
  }

  CLayer layer;
  int ranks;
  const char* schedule = "auto";
  GroupHandle group;
  PlacementHandle placement;
  std::vector<Bytes> saved_memory, workspace, pending_memory;
  SavedHandle saved;
  PendingHandle pending;
};

TEST(CMemory, OfTheCallerGivesTheSameBits) {
  const char* schedules[] = {"auto", "fusion=none", "save.xg=redispatch", "combine.transport=staged"};
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const RandomLayer random = random_layer(seed);
    count_layer(branches, random);
    SCOPED_TRACE(random.description);
    OwnMemory own(random);
    own.schedule = schedules[seed % std::size(schedules)];
    cli::LayerResult expected = run_sequential(random);
    expected.z.clear();
    ASSERT_EQ(own.forward(1), UNIEP_OK) << uniep_last_error();

    // A saved state is its bytes: copied, of another placement, without the handle of its forward.
    const std::vector<Bytes> copy = own.saved_memory;
    own.saved.reset();
    own.saved_memory.clear();
    own.placement = own.layer.place(own.group.get());
    ASSERT_EQ(own.attach(copy, own.placement.get()), UNIEP_OK) << uniep_last_error();
    const bool later = seed % 2 == 0, last_use = seed % 3 == 0;
    ASSERT_EQ(own.backward(later ? UNIEP_WEIGHT_GRADIENTS_LATER : UNIEP_WEIGHT_GRADIENTS_NOW, last_use), UNIEP_OK)
        << uniep_last_error();
    if (later) {
      own.saved.reset();
      ASSERT_EQ(own.make_gradients(), UNIEP_OK) << uniep_last_error();
    }
    ASSERT_EQ(difference(own.layer.result, expected), "");
  }
  branches.expect_all_taken();
}

TEST(CMemory, AForwardMayKeepNothing) {
  for (const char* schedule : {"auto", "save.xg=redispatch", "combine.transport=staged"}) {
    const RandomLayer random = random_layer(21, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8});
    OwnMemory own(random);
    own.schedule = schedule;
    expect_ok(own.forward(1));
    const std::vector<BFloat16> expected = own.layer.result.y;
    own.layer.result.y.assign(expected.size(), BFloat16{0xffff});
    expect_ok(own.forward(0));
    EXPECT_EQ(own.saved, nullptr);
    EXPECT_EQ(std::memcmp(own.layer.result.y.data(), expected.data(), expected.size() * sizeof(BFloat16)), 0);
    const std::vector<uniep_memory_need> kept = own.needs(1), none = own.needs(0);
    for (std::size_t rank = 0; rank < none.size(); ++rank) {
      EXPECT_EQ(none[rank].saved_bytes, 0u);
      EXPECT_EQ(none[rank].workspace_bytes, kept[rank].saved_bytes + kept[rank].workspace_bytes);
      EXPECT_GT(kept[rank].saved_bytes, 0u);
    }
  }
}

class CMemoryErrors : public testing::Test {
 protected:
  CMemoryErrors() : random(random_layer(21, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8})), own(random) {
    expect_ok(own.forward(1));
    forward_arguments = own.layer.forward_arguments;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      forward_arguments[rank].saved_memory = own.saved_memory[rank].given();
      forward_arguments[rank].workspace_memory = own.workspace[rank].given();
    }
  }

  uniep_status forward() {
    uniep_saved* made = nullptr;
    const uniep_status status = uniep_forward(own.group.get(), &own.layer.config, own.schedule, own.placement.get(),
                                              forward_arguments.data(), 2, &made);
    EXPECT_EQ(made == nullptr, status != UNIEP_OK);
    uniep_saved_destroy(made);
    return status;
  }

  RandomLayer random;
  OwnMemory own;
  std::vector<uniep_forward_arguments> forward_arguments;
};

TEST_F(CMemoryErrors, SayWhatIsNeeded) {
  const std::size_t needed = own.needs(1)[1].saved_bytes, work = own.needs(1)[0].workspace_bytes;
  expect_ok(forward());
  forward_arguments[1].saved_memory.bytes = needed - 1;
  expect_failure(UNIEP_OUT_OF_MEMORY,
                 "saved_memory: " + std::to_string(needed - 1) + " bytes on rank 1; must be " + std::to_string(needed),
                 forward());
  forward_arguments[1].saved_memory.bytes = needed + 1;
  expect_ok(forward());
  void* const aligned = forward_arguments[0].workspace_memory.data;
  forward_arguments[0].workspace_memory.data = static_cast<std::byte*>(aligned) + 32;
  expect_failure(UNIEP_INVALID_ARGUMENT, "workspace_memory: its address on rank 0", forward());
  forward_arguments[0].workspace_memory.data = aligned;
  forward_arguments[0].workspace_memory.bytes = 0;
  expect_failure(UNIEP_OUT_OF_MEMORY, "must be " + std::to_string(work) + " or more", forward());
  forward_arguments[0].workspace_memory.data = nullptr;  // the allocator's, which has no room
  expect_failure(UNIEP_OUT_OF_MEMORY, "no room for " + std::to_string(work) + " bytes on rank 0", forward());

  expect_ok(own.backward(UNIEP_WEIGHT_GRADIENTS_LATER, 0));
  uniep_backward_arguments backward[2] = {own.layer.backward_arguments[0], own.layer.backward_arguments[1]};
  for (std::size_t rank = 0; rank < 2; ++rank) {
    backward[rank].weight_gradients = UNIEP_WEIGHT_GRADIENTS_LATER;
    backward[rank].workspace_memory = own.workspace[rank].given();
    backward[rank].pending_memory = own.pending_memory[rank].given();
  }
  const auto run = [&] {
    uniep_pending* made = nullptr;
    const uniep_status status =
        uniep_backward(own.group.get(), &own.layer.config, own.schedule, own.saved.get(), backward, 2, &made);
    uniep_pending_destroy(made);
    return status;
  };
  expect_ok(run());
  backward[1].pending_memory.bytes -= 1;
  expect_failure(UNIEP_OUT_OF_MEMORY, "pending_memory: ", run());
  backward[1].pending_memory.bytes += 1;
  backward[0].workspace_memory.bytes -= 1;
  expect_failure(UNIEP_OUT_OF_MEMORY, "workspace_memory: ", run());
}

TEST_F(CMemoryErrors, OfAttachedStates) {
  uniep_saved* made = own.saved.get();
  uniep_caller_memory memory[2] = {own.saved_memory[0].given(), own.saved_memory[1].given()};
  const auto attach = [&](uniep_group* group, const uniep_layer_config* config, const char* schedule,
                          const uniep_placement* placement, int32_t count = 2) {
    const uniep_status status = uniep_saved_attach(group, config, schedule, placement, memory, count, &made);
    EXPECT_EQ(made == nullptr, status != UNIEP_OK);
    uniep_saved_destroy(made);
    return status;
  };
  uniep_group* const g = own.group.get();
  const uniep_layer_config* const c = &own.layer.config;
  const uniep_placement* const p = own.placement.get();
  expect_ok(attach(g, c, "auto", p));
  expect_failure(UNIEP_INVALID_ARGUMENT, "group: null pointer", attach(nullptr, c, "auto", p));
  expect_failure(UNIEP_INVALID_ARGUMENT, "config: null pointer", attach(g, nullptr, "auto", p));
  expect_failure(UNIEP_INVALID_ARGUMENT, "schedule: null pointer", attach(g, c, nullptr, p));
  expect_failure(UNIEP_INVALID_ARGUMENT, "placement: null pointer", attach(g, c, "auto", nullptr));
  expect_failure(UNIEP_INVALID_ARGUMENT, "count: 1; must be 2", attach(g, c, "auto", p, 1));
  expect_failure(UNIEP_INVALID_ARGUMENT, "memory: null pointer",
                 uniep_saved_attach(g, c, "auto", p, nullptr, 2, &made));
  expect_failure(UNIEP_INVALID_ARGUMENT, "saved: null pointer",
                 uniep_saved_attach(g, c, "auto", p, memory, 2, nullptr));
  memory[1].bytes -= 1;
  expect_failure(UNIEP_INVALID_ARGUMENT, "memory: " + std::to_string(memory[1].bytes) + " bytes on rank 1",
                 attach(g, c, "auto", p));
  memory[1].bytes += 1;
  memory[0].data = static_cast<std::byte*>(memory[0].data) + 16;
  expect_failure(UNIEP_INVALID_ARGUMENT, "memory: its address on rank 0", attach(g, c, "auto", p));
  memory[0].data = nullptr;
  expect_failure(UNIEP_INVALID_ARGUMENT, "memory: null on rank 0", attach(g, c, "auto", p));
  std::vector<uniep_memory_need> needs(2, {sizeof(uniep_memory_need), 0, 0, 0, 0});
  expect_failure(UNIEP_INVALID_ARGUMENT, "keep_saved: 2; legal are 0 and 1",
                 uniep_query_forward_memory(g, c, "auto", p, 2, needs.data(), 2));
}

// What keeps no xg can not be used as if it did.
TEST_F(CMemoryErrors, StatesOfAnotherScheduleAreTooSmall) {
  own.schedule = "save.xg=redispatch";
  expect_ok(own.forward(1));
  own.schedule = "save.xg=keep";
  expect_failure(UNIEP_INVALID_ARGUMENT, "must be ", own.attach(own.saved_memory, own.placement.get()));
}

// More texts than a group remembers, so that old ones are resolved again; each call must take its own.
TEST(CSchedules, ARepeatedTextResolvesToTheSame) {
  const RandomLayer random = random_layer(3, {{2}, 4, 16, 32});
  const CLayer layer(random);
  const GroupHandle group = make_group(group_options(2));
  const auto resolved = [&](const uniep_layer_config& config, int32_t direction, const std::string& text) {
    char buffer[4096] = "";
    std::size_t needed = 0;
    expect_ok(uniep_schedule_resolve(group.get(), &config, direction, text.c_str(), buffer, sizeof(buffer), &needed));
    return std::string(buffer);
  };
  uniep_layer_config wider = layer.config;
  wider.hidden *= 2;
  std::vector<std::string> first;
  for (int pass = 0; pass < 3; ++pass) {
    std::size_t next = 0;
    for (int raster = 1; raster <= 16; ++raster) {
      for (const char* queue : {"static", "dynamic"}) {
        const std::string text = "order.raster=" + std::to_string(raster) + ",queue=" + queue;
        for (const int32_t direction : {UNIEP_FORWARD, UNIEP_BACKWARD}) {
          for (const uniep_layer_config& config : {layer.config, wider}) {
            const std::string got = resolved(config, direction, text);
            if (pass == 0) first.push_back(got);
            ASSERT_EQ(got, first[next++]);
            ASSERT_NE(got.find("\"order.raster\": " + std::to_string(raster) + ","), std::string::npos) << got;
            ASSERT_NE(got.find(queue), std::string::npos);
          }
        }
      }
    }
  }
  std::size_t needed = 0;
  for (int pass = 0; pass < 2; ++pass) {
    expect_failure(
        UNIEP_INVALID_ARGUMENT, "order.raster",
        uniep_schedule_resolve(group.get(), &layer.config, UNIEP_FORWARD, "order.raster=99", nullptr, 0, &needed));
  }
}

}  // namespace
}  // namespace uniep::test
