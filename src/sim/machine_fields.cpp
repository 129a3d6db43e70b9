#include "sim/machine_fields.h"

#include <array>

namespace uniep::sim {

// As files of earlier versions mean it.
#define UNIEP_NUMBER_SINCE(version, section, key, unit, least, most, before, meaning)             \
  NumberField {                                                                                   \
#section, #key, unit, least, most, false,                                                     \
        [](MachineDescription & m) -> double& { return m.section.key; }, meaning, version, before \
  }

#define UNIEP_NUMBER(section, key, unit, least, most, whole, meaning)                                                  \
  NumberField {                                                                                                        \
#section, #key, unit, least, most, whole, [](MachineDescription & m) -> double& { return m.section.key; }, meaning \
  }

std::span<const NumberField> number_fields() {
  static const std::array kFields = {
      UNIEP_NUMBER(clock, limit, "GHz", 0.01, 100, false, "clock at the power limit under full load"),
      UNIEP_NUMBER(clock, limit_exponent, "1", 0, 4, false, "under a load l the clock is limit l^-limit_exponent"),
      UNIEP_NUMBER(clock, pause, "GHz", 0.01, 100, false, "clock after a pause"),
      UNIEP_NUMBER(clock, pause_drop, "GHz/ms", 0, 10, false, "what it loses in a call"),
      UNIEP_NUMBER(clock, pause_lowest, "GHz", 0.01, 100, false, "where that ends"),
      UNIEP_NUMBER(clock, highest, "GHz", 0.01, 100, false, "highest clock"),
      UNIEP_NUMBER(clock, rest, "us", 0, 1e6, false, "rest between two calls at the power limit"),
      UNIEP_NUMBER_SINCE(2, clock, waiting, "1", 0, 1, 1,
                         "share of a load that a tile is while no tensor core works on it"),
      UNIEP_NUMBER_SINCE(3, clock, linked, "1", 0, 0.9, 0,
                         "share that the clock loses at the power limit where rows go between ranks"),
      UNIEP_NUMBER(copy, task, "us", 0, 1e6, false, "a dispatch task of one warp"),
      UNIEP_NUMBER(copy, chunk_in, "us", 0, 1e6, false, "4096 bytes taken in by one warp"),
      UNIEP_NUMBER(copy, chunk_out, "us", 0, 1e6, false, "4096 bytes put somewhere by one warp"),
      UNIEP_NUMBER_SINCE(3, copy, chunk_remote, "us", 0, 1e6, 0, "more for 4096 bytes from another rank"),
      UNIEP_NUMBER(copy, chunk_fixed, "1", 0, 1, false, "share of a chunk's time that does not follow its size"),
      UNIEP_NUMBER(copy, alone, "1", 0.01, 10, false, "share of the time that copies take while no tiles run"),
      UNIEP_NUMBER(copy, push, "us", 0, 1e6, false, "more a task under push"),
      UNIEP_NUMBER(copy, send, "us", 0, 1e6, false, "a chunk that a staged combine sends"),
      UNIEP_NUMBER_SINCE(2, copy, send_fixed, "1", 0, 1, 1, "share of that which does not follow its size"),
      UNIEP_NUMBER_SINCE(2, copy, ring, "1", 0, 10, 0, "of a chunk's time with a ring of three stages what is latency"),
      UNIEP_NUMBER_SINCE(2, copy, clocked, "1", 0, 1, 0, "share of the time of copies that follows the clock"),
      UNIEP_NUMBER(port, warps, "count", 1, 64, true, "warps that copy on a worker that does nothing else"),
      UNIEP_NUMBER(port, in, "ps/byte", 0, 1e6, false, "a byte into such a worker"),
      UNIEP_NUMBER(port, out, "ps/byte", 0, 1e6, false, "a byte out of it"),
      UNIEP_NUMBER(port, overhead, "1", 0, 10, false, "share that is lost"),
      UNIEP_NUMBER_SINCE(2, pipeline, latency, "us", 0, 1e6, 0, "until operands that are asked for begin to come"),
      UNIEP_NUMBER_SINCE(2, pipeline, busy, "us", 0, 1e6, 0, "more of that while all workers ask"),
      UNIEP_NUMBER_SINCE(2, pipeline, port, "bytes/cycle", 0, 1e6, 0,
                         "operands into one worker at clock.highest; 0: no limit"),
      UNIEP_NUMBER(memory, bandwidth, "GB/s", 1, 1e6, false, "read and written"),
      UNIEP_NUMBER(memory, capacity, "GB", 0.001, 1e6, false, "of a rank"),
      UNIEP_NUMBER(memory, l2, "MB", 0, 1e6, false, "last cache before memory"),
      UNIEP_NUMBER(memory, shared, "bytes", 1024, 1 << 30, true, "memory of a worker for its pipeline and ring"),
      UNIEP_NUMBER(sums, beside, "GB/s", 0.1, 1e6, false, "sums by copying warps beside tiles, read and written"),
      UNIEP_NUMBER(sums, alone, "GB/s", 0.1, 1e6, false, "sums by all warps, read and written"),
      UNIEP_NUMBER(slowdown, copies, "1", -0.9, 10, false,
                   "tiles beside copies, whose rows and chunks take so much from them"),
      UNIEP_NUMBER(slowdown, sums, "1", -0.9, 10, false, "tiles beside summing warps"),
      UNIEP_NUMBER(slowdown, mixed_list, "1", -0.9, 10, false, "tiles of both GEMMs by turns, at the power limit"),
      UNIEP_NUMBER(slowdown, mixed_list_pause, "1", -0.9, 10, false, "tiles of both GEMMs by turns, after pauses"),
      UNIEP_NUMBER(slowdown, mixed_queues, "1", -0.9, 10, false, "tiles where each GEMM has a queue"),
      UNIEP_NUMBER(slowdown, raster_8, "1", -0.9, 10, false, "tiles in bands of 5 to 8 row blocks"),
      UNIEP_NUMBER(slowdown, raster_4, "1", -0.9, 10, false, "tiles in bands of up to 4 row blocks"),
      UNIEP_NUMBER(slowdown, cluster_1, "1", -0.9, 10, false, "tiles of workers that share none"),
      UNIEP_NUMBER(slowdown, static_queue, "1", -0.9, 10, false, "tiles under static queues"),
      UNIEP_NUMBER(slowdown, fused, "1", -0.9, 10, false, "tiles in a launch with copies or sums"),
      UNIEP_NUMBER(time, begin, "us", 0, 1e6, false, "from the call to the first copy"),
      UNIEP_NUMBER_SINCE(3, time, peers, "us", 0, 1e6, 0, "more from the call to the first copy with several ranks"),
      UNIEP_NUMBER(time, launch, "us", 0, 1e6, false, "between two launches of a call"),
      UNIEP_NUMBER(time, end, "us", 0, 1e6, false, "from the last sum to the end of the call on all ranks"),
      UNIEP_NUMBER(time, flag, "us", 0, 1e6, false, "until who waits for a counter or flag goes on"),
      UNIEP_NUMBER(time, late_blocks, "count", 0, 1024, false, "K blocks of the next tile until results are stored"),
      UNIEP_NUMBER(time, task_static, "us", 0, 1e6, false, "the next tile under static queues"),
      UNIEP_NUMBER(time, task_dynamic, "us", 0, 1e6, false, "the next tile under dynamic queues"),
      UNIEP_NUMBER(weight_gradient, fp32, "cycles", 0, 1e9, false, "more a tile whose sums are stored in fp32"),
  };
  return kFields;
}

#undef UNIEP_NUMBER_SINCE
#undef UNIEP_NUMBER

}  // namespace uniep::sim
