#include <fmt/format.h>

#include "tune/calibration.h"

namespace uniep::tune {
namespace {

using sim::State;

constexpr LayerShape kMiddle = {4096, 1536, 16, 8}, kSmall = {2048, 768, 16, 8}, kLarge = {7168, 2048, 32, 8};
constexpr LayerShape kHeldOut = {2880, 2880, 16, 4};  // a shape that nothing is fitted to
constexpr LayerShape kNarrow = {4096, 256, 16, 8};    // on two GPUs links have more to do than tensor cores
constexpr LayerShape kWideExperts = {4096, 14336, 2, 2};

class Layers {
 public:
  // Layers that follow are of this shape and state.
  void of(const LayerShape& shape, int64_t tokens, State state, Direction direction = Direction::kForward) {
    like_.shape = shape;
    like_.shape.experts *= like_.ranks;
    like_.tokens = tokens;
    like_.state = state;
    like_.direction = direction;
  }
  void on(int ranks) { like_.ranks = ranks; }
  void add(std::initializer_list<const char*> schedules, bool held_out = false) {
    for (const char* schedule : schedules) {
      all.push_back(like_);
      all.back().schedule = schedule;
      all.back().held_out = held_out;
    }
  }
  void hold_out(std::initializer_list<const char*> schedules) { add(schedules, true); }

  std::vector<CalibrationLayer> all;

 private:
  CalibrationLayer like_;
};

constexpr const char* kMixed = "order.interleave=mixed,order.experts_per_wave=4,order.raster=8,combine.column_chunks=1";

void add_one_gpu(Layers& layers) {
  layers.of(kMiddle, 4096, State::kSustained);
  layers.add({"auto", kMixed, "order.interleave=mixed,queue=static,order.experts_per_wave=4,order.raster=8",
              "queue=static", "order.raster=8", "order.raster=4", "order.experts_per_wave=4,combine.column_chunks=2",
              "tile.cluster=1", "tile.n=128", "fusion=pairs", "fusion=none", "dispatch.transport=push",
              "dispatch.dedup=off", "comm.chunk_bytes=1024", "combine.transport=staged",
              "comm.where=sms,comm.dispatch_sms=8", "comm.where=sms,comm.dispatch_sms=32,comm.reduce_sms=8"});
  layers.hold_out({"order.interleave=mixed,order.experts_per_wave=2,order.raster=8,combine.column_chunks=2",
                   "order.experts_per_wave=8,order.raster=12,combine.column_chunks=1",
                   "comm.where=sms,comm.dispatch_sms=16", "fusion=pairs,queue=static",
                   "tile.n=128,order.interleave=mixed,order.experts_per_wave=4,order.raster=8",
                   "dispatch.transport=push,order.raster=8"});
  layers.of(kMiddle, 4096, State::kPaused);
  layers.add({"auto", kMixed, "order.interleave=mixed,queue=static,order.experts_per_wave=4,order.raster=8"});
  layers.of(kSmall, 8192, State::kSustained);
  layers.add({"auto", kMixed, "order.interleave=phased,queue=static", "tile.n=128,order.interleave=phased",
              "fusion=none", "comm.where=sms,comm.dispatch_sms=24", "dispatch.transport=push"});
  layers.hold_out({"order.interleave=phased,order.raster=16,combine.column_chunks=2", "fusion=pairs",
                   "order.interleave=mixed,order.experts_per_wave=1,order.raster=16"});
  layers.of(kSmall, 8192, State::kPaused);
  layers.add({"auto"});
  layers.hold_out({kMixed});
  layers.of(kLarge, 4096, State::kSustained);
  layers.add({"auto", "tile.cluster=1"});
  layers.hold_out({kMixed, "queue=static"});
  layers.of(kSmall, 256, State::kSustained);
  layers.add({"auto", "fusion=pairs", "fusion=none"});
  layers.of(kWideExperts, 512, State::kSustained);
  layers.add({"auto"});
  layers.of(kMiddle, 1024, State::kSustained);
  layers.add({"auto"});
  layers.hold_out({"fusion=pairs"});
  layers.of(kMiddle, 8192, State::kSustained);
  layers.hold_out({"auto", kMixed});
  layers.of(kHeldOut, 4096, State::kSustained);
  layers.hold_out({"auto", "order.interleave=mixed,order.experts_per_wave=4,order.raster=8"});
  layers.of(kMiddle, 4096, State::kSustained, Direction::kBackward);
  layers.add({"auto", "fusion=none"});
  layers.hold_out({"backward.wgrad=after"});
  layers.of(kSmall, 8192, State::kSustained, Direction::kBackward);
  layers.add({"auto"});
  layers.hold_out({"fusion=none"});
  // What waits: tiles for operands, copies for their ring; a GPU with little to do.
  layers.of(kMiddle, 4096, State::kSustained);
  layers.add({"tile.stages=2", "comm.stages=1", "comm.reserve_sms=100", "combine.transport=staged,comm.chunk_bytes=512",
              "comm.where=sms,comm.dispatch_sms=2"});
  layers.hold_out({"tile.stages=2,comm.reserve_sms=64", "comm.stages=1,comm.reserve_sms=64"});
}

void add_two_gpus(Layers& layers) {
  layers.on(2);
  layers.of(kNarrow, 4096, State::kSustained);
  layers.add({"dispatch.dedup=off", kMixed, "dispatch.dedup=off,dispatch.transport=push",
              "dispatch.dedup=off,combine.transport=staged", "dispatch.dedup=off,fusion=none",
              "dispatch.dedup=off,fusion=none,comm.where=sms,comm.dispatch_sms=64",
              "comm.where=sms,comm.dispatch_sms=24"});
  layers.hold_out({"auto", "dispatch.transport=push"});
  layers.of(kMiddle, 4096, State::kSustained);
  layers.add({"auto", kMixed});
  layers.hold_out({"dispatch.dedup=off,order.interleave=mixed,order.experts_per_wave=2,order.raster=8"});
  layers.of(kSmall, 8192, State::kSustained);
  layers.add({"auto", "dispatch.dedup=off"});
  layers.hold_out({"order.interleave=phased"});
  layers.of(kNarrow, 4096, State::kSustained, Direction::kBackward);
  layers.add({"auto", "dispatch.dedup=off", "fusion=none"});
  layers.hold_out({"backward.wgrad=after"});
  layers.of(kMiddle, 4096, State::kSustained, Direction::kBackward);
  layers.add({"auto", "fusion=pairs"});
  layers.hold_out({"fusion=none"});
  layers.of(kSmall, 8192, State::kSustained, Direction::kBackward);
  layers.add({"auto", "dispatch.dedup=off", "backward.wgrad=after"});
  layers.hold_out({"fusion=none"});
}

}  // namespace

std::string layer_name(const CalibrationLayer& layer) {
  const LayerShape& shape = layer.shape;
  return fmt::format("{},{},{},{} x {}, T {}, {}, {}: {}", shape.hidden, shape.intermediate, shape.experts, shape.topk,
                     layer.ranks, layer.tokens, layer.direction == Direction::kForward ? "forward" : "backward",
                     layer.state == State::kSustained ? "sustained" : "paused", layer.schedule);
}

bool share_tensors(const CalibrationLayer& a, const CalibrationLayer& b) {
  return a.shape == b.shape && a.ranks == b.ranks && a.tokens == b.tokens && a.direction == b.direction;
}

bool take_turns(const CalibrationLayer& a, const CalibrationLayer& b) {
  return share_tensors(a, b) && a.state == b.state;
}

std::vector<CalibrationLayer> calibration_layers(int ranks) {
  Layers layers;
  add_one_gpu(layers);
  if (ranks > 1) add_two_gpus(layers);
  return layers.all;
}

}  // namespace uniep::tune
