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
        layer.use_schedule(PartialSchedule::parse(std::string("save.xg=") + (again ? "redispatch" : "keep") +
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
            compare("forward, " + name,
                    memory_need(layer.group(), config, layer.schedule(), Direction::kForward, placement));
            look();
            PendingWeightGradients work = backward.backward(arrays, back, saved, &gradients, {time, last_use});
            compare(name, memory_need(layer.group(), config, backward.schedule(), Direction::kBackward, placement,
                                      {time, last_use}));
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

}  // namespace uniep::cuda::test
