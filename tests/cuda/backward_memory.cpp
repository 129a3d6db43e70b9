#include "tests/cuda/backward_memory.h"

#include "engine/engine.h"
#include "tests/cuda/backward_cases.h"
#include "tests/cuda/counting_allocator.h"
#include "tests/cuda/host_delay.h"

namespace uniep::cuda::test {
namespace {

constexpr int kHeldUpMilliseconds = 20;

}  // namespace

void run_aside(const Where& where, Results& results) {
  LayerConfig config;
  config.shape = {.hidden = 256, .intermediate = 128, .experts = int64_t{4} * where.group.ranks, .topk = 2};
  DeviceLayer layer(where.group, config, results, kernel_folder());
  DeviceBackward backward(layer);
  const auto hold_up = [&] {
    for (std::size_t local = 0; local < static_cast<std::size_t>(layer.group().local_ranks()); ++local) {
      const ScopedDevice scope(layer.device_of(local));
      hold_up_on_host(backward.aside_of(local), kHeldUpMilliseconds);
    }
  };
  const GradientArrays gradients = backward.gradients(), of_other = backward.gradients();
  for (const bool last_use : {false, true}) {
    for (int i = 0; i < 3; ++i) {
      Batch batch = forward_batch(layer, backward, 200, true);
      Batch other = forward_batch(layer, backward, 200, true);
      other.called = {};
      backward.start(gradients);
      PendingWeightGradients work =
          backward.backward(batch.call, batch.back, batch.called.saved, nullptr, {kLater, last_use});
      backward.join_aside();
      layer.synchronize();
      hold_up();
      backward.make(work, gradients, {.aside = true});
      work = {};
      batch.called = {};
      for (int turn = 0; turn < 2; ++turn) {
        other.called = layer.call(other.call, other.call.capacity);
        backward.backward(other.call, other.back, other.called.saved, nullptr, {kLater, false});  // its work is dropped
        backward.backward(other.call, other.back, other.called.saved, &of_other, {kNow, last_use});
      }
      const std::string name = std::string("aside: ") + (last_use ? "last use, " : "") + std::to_string(i);
      backward.expect(name, gradients, batch.expected);
      backward.expect(name + ", the calls beside it", of_other, other.expected);
    }
  }
  layer.group().implementation().meet();
}

void run_release(const Where& where, Results& results) {
  LayerConfig config;
  config.shape = {.hidden = 256, .intermediate = 128, .experts = int64_t{4} * where.group.ranks, .topk = 2};
  CountingAllocator counter(where.group.devices);
  GroupOptions options = where.group;
  options.allocator = counter.allocator();
  DeviceLayer layer(options, config, results, kernel_folder());
  DeviceBackward backward(layer);
  const GradientArrays gradients = backward.gradients();
  for (int i = 0; i < 3; ++i) {
    Batch batch = forward_batch(layer, backward, 200, true);
    PendingWeightGradients work = backward.backward(batch.call, batch.back, batch.called.saved, nullptr, {kLater});
    backward.make(work, gradients, {.aside = true});
    backward.join_aside();
    layer.synchronize();
    backward.upload(batch.back, batch.data);
    backward.start(gradients);
    for (std::size_t local = 0; local < batch.call.local.size(); ++local) {
      const ScopedDevice scope(layer.device_of(local));
      hold_up_on_host(layer.stream_of(local), kHeldUpMilliseconds);
    }
    backward.backward(batch.call, batch.back, batch.called.saved, &gradients);
    work = {};
    batch.called = {};
    backward.expect("release: " + std::to_string(i), batch.back, batch.call, batch.expected);
    backward.expect("release: " + std::to_string(i), gradients, batch.expected);
  }
  layer.group().synchronize();
  results.record("release: all is given back", counter.all_live() == 0);
  layer.group().implementation().meet();
}

void run_memory(const Where& where, Results& results) {
  LayerConfig config;
  config.shape = {.hidden = 320, .intermediate = 192, .experts = int64_t{4} * where.group.ranks, .topk = 2};
  CountingAllocator counter(where.group.devices);
  int calls = 0;
  {
    GroupOptions options = where.group;
    options.allocator = counter.allocator();
    DeviceLayer layer(options, config, results, kernel_folder());
    DeviceBackward backward(layer);
    const int ranks = layer.group().local_ranks();
    std::vector<std::size_t> requested(static_cast<std::size_t>(ranks)), live(static_cast<std::size_t>(ranks));
    const auto look = [&] {
      for (int local = 0; local < ranks; ++local) {
        const int rank = layer.rank_of(static_cast<std::size_t>(local));
        requested[static_cast<std::size_t>(local)] = counter.requested(rank);
        live[static_cast<std::size_t>(local)] = counter.live(rank);
      }
    };
    const auto compare = [&](const std::string& name, const std::vector<MemoryNeed>& needs) {
      std::string wrong;
      for (int local = 0; local < ranks; ++local) {
        const auto i = static_cast<std::size_t>(local);
        const int rank = layer.rank_of(i);
        const std::size_t stays = needs[i].saved_bytes + needs[i].pending_bytes;
        const std::size_t asked = counter.requested(rank) - requested[i], kept = counter.live(rank) - live[i];
        if (asked == stays + needs[i].workspace_bytes && kept == stays) continue;
        wrong += "rank " + std::to_string(rank) + ": asked for " + std::to_string(asked) + " and kept " +
                 std::to_string(kept) + " bytes, not " + std::to_string(stays + needs[i].workspace_bytes) + " and " +
                 std::to_string(stays) + "; ";
      }
      results.record("memory: " + name, wrong.empty(), wrong);
      ++calls;
    };
    const GradientArrays gradients = backward.gradients();
    for (const bool within : {false, true}) {
      for (const std::string& schedule : kBackwardSchedules) {
        const bool again = schedule.find("redispatch") != std::string::npos;
        const bool staged = schedule.find("staged") != std::string::npos;
        const bool recomputes = schedule.find("recompute") != std::string::npos;
        layer.use_schedule(PartialSchedule::parse(std::string("save.xg=") + (again ? "redispatch" : "keep") +
                                                  (recomputes ? ",save.z=recompute" : "") +
                                                  (staged ? ",combine.transport=staged" : "")));
        backward.use_schedule(PartialSchedule::parse(schedule));
        for (const WeightGradientTime time : {kNow, kLater, kNone}) {
          for (const bool last_use : {false, true}) {
            CallArrays arrays = layer.arrays(layer.tokens(150));
            const cli::LayerData data = layer.with_dy(layer.batch(arrays.tokens));
            const BackwardArrays back = backward.arrays(arrays.tokens);
            layer.upload(arrays, data);
            backward.upload(back, data);
            backward.start(gradients);
            Placement placement = layer.place(arrays, within ? arrays.capacity : Capacity{});
            const std::string name = schedule + (within ? ", within" : ", by need") +
                                     kTimeNames[static_cast<int>(time)] + (last_use ? ", last use" : "");
            look();
            Saved saved = layer.forward(arrays, placement);
            compare("forward, " + name, memory_need(layer.group(), config, layer.schedule(), placement));
            look();
            PendingWeightGradients work = backward.backward(arrays, back, saved, &gradients, {time, last_use});
            compare(name,
                    memory_need(layer.group(), config, backward.schedule(), placement,
                                {.weight_gradients = time, .last_use = last_use, .direction = Direction::kBackward}));
            saved = Saved();
            placement = Placement();
            if (time == kLater) backward.make(work, gradients, {.aside = true});
            work = {};
            const cli::LayerResult expected = backward.oracle(data);
            backward.expect("memory: bytes, " + name, back, arrays, expected);
            backward.expect("memory: bytes, " + name, gradients, time == kNone ? backward.started() : expected);
            layer.group().synchronize();
            results.record("memory: all is given back, " + name, counter.all_live() == 0);
          }
        }
      }
    }
    layer.synchronize();
    layer.group().implementation().meet();
  }
  std::printf("memory, %s: %d calls counted\n", where.name.c_str(), calls);
}

namespace {

// Blocks of a caller, of exactly as many bytes, for the calls' arguments.
std::vector<DeviceArray> blocks_of(const DeviceLayer& layer, const std::vector<MemoryNeed>& needs,
                                   std::size_t MemoryNeed::*bytes) {
  std::vector<DeviceArray> blocks;
  for (std::size_t local = 0; local < needs.size(); ++local) {
    blocks.emplace_back(layer.device_of(local), static_cast<int64_t>(needs[local].*bytes));
    blocks.back().fill(0xff);
  }
  return blocks;
}

std::vector<CallerMemory> memory_of(const std::vector<DeviceArray>& blocks, const std::vector<MemoryNeed>& needs,
                                    std::size_t MemoryNeed::*bytes) {
  std::vector<CallerMemory> memory;
  for (std::size_t local = 0; local < needs.size(); ++local) {
    memory.push_back({blocks[local].data(), needs[local].*bytes});
  }
  return memory;
}

}  // namespace

void run_own_memory(const Where& where, Results& results) {
  LayerConfig config;
  config.shape = {.hidden = 320, .intermediate = 192, .experts = int64_t{4} * where.group.ranks, .topk = 2};
  CountingAllocator counter(where.group.devices);
  GroupOptions options = where.group;
  options.allocator = counter.allocator();
  DeviceLayer layer(options, config, results, kernel_folder());
  DeviceBackward backward(layer);
  Group& group = layer.group();
  const std::size_t ranks = static_cast<std::size_t>(group.local_ranks());
  const GradientArrays gradients = backward.gradients();
  for (const bool within : {false, true}) {
    for (const char* save :
         {"save.xg=keep", "save.xg=redispatch", "save.z=recompute", "save.xg=redispatch,save.z=recompute"}) {
      for (const WeightGradientTime time : {kNow, kLater}) {
        layer.use_schedule(PartialSchedule::parse(save));
        backward.use_schedule(PartialSchedule::parse(save));
        const CallArrays arrays = layer.arrays(layer.tokens(150));
        const cli::LayerData data = layer.with_dy(layer.batch(arrays.tokens));
        const BackwardArrays back = backward.arrays(arrays.tokens);
        layer.upload(arrays, data);
        backward.upload(back, data);
        backward.start(gradients);
        const Capacity capacity = within ? arrays.capacity : Capacity{};
        Placement placement = layer.place(arrays, capacity);
        const std::string name = std::string("own memory: ") + save + (within ? ", within" : ", by need") +
                                 kTimeNames[static_cast<int>(time)];

        std::vector<DeviceArray> kept_blocks;
        std::vector<CallerMemory> kept;
        for (const bool keep : {true, false}) {  // the second gives the same y and leaves what the first has kept
          const std::vector<MemoryNeed> needs =
              memory_need(group, config, layer.schedule(), placement, {.keep_saved = keep});
          const std::vector<DeviceArray> work = blocks_of(layer, needs, &MemoryNeed::workspace_bytes);
          const std::vector<CallerMemory> work_memory = memory_of(work, needs, &MemoryNeed::workspace_bytes);
          if (keep) {
            kept_blocks = blocks_of(layer, needs, &MemoryNeed::saved_bytes);
            kept = memory_of(kept_blocks, needs, &MemoryNeed::saved_bytes);
          }
          std::vector<ForwardArguments> arguments(ranks);
          for (std::size_t local = 0; local < ranks; ++local) {
            arguments[local].x = arrays.local[local].input;
            arguments[local].weights = layer.weights_of(local);
            arguments[local].y = static_cast<BFloat16*>(arrays.local[local].y.data());
            arguments[local].stream = Stream{layer.stream_of(local)};
            arguments[local].workspace_memory = work_memory[local];
            if (keep) arguments[local].saved_memory = kept[local];
          }
          CallOptions call;
          call.keep_saved = keep;
          const Saved saved = forward(group, config, layer.schedule(), placement, arguments, call);
          results.record(name + ", a Saved where one is kept", saved.empty() != keep);
          layer.synchronize();
        }

        placement = layer.place(arrays, capacity);
        const Saved saved = attach_saved(group, config, layer.schedule(), placement, kept);
        const MemoryOptions use{.weight_gradients = time, .direction = Direction::kBackward};
        const std::vector<MemoryNeed> needs = memory_need(group, config, backward.schedule(), placement, use);
        const std::vector<DeviceArray> work = blocks_of(layer, needs, &MemoryNeed::workspace_bytes);
        const std::vector<DeviceArray> left = blocks_of(layer, needs, &MemoryNeed::pending_bytes);
        const PendingWeightGradients pending = backward.backward(
            arrays, back, saved, &gradients, use,
            {memory_of(work, needs, &MemoryNeed::workspace_bytes), memory_of(left, needs, &MemoryNeed::pending_bytes)});
        if (time == kLater) backward.make(pending, gradients);
        const cli::LayerResult expected = backward.oracle(data);
        backward.expect(name, back, arrays, expected);
        backward.expect(name, gradients, expected);
        layer.synchronize();
      }
    }
  }
  for (std::size_t local = 0; local < ranks; ++local) {
    const int rank = layer.rank_of(local);
    results.record("own memory: the allocator is asked for nothing on rank " + std::to_string(rank),
                   counter.requested(rank) == 0, std::to_string(counter.requested(rank)) + " bytes");
  }
  group.implementation().meet();
}

}  // namespace uniep::cuda::test
