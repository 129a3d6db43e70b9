// Words that one warp hands to another, over and over: each idiom by which the layer's kernels do it, beside traffic.
#include "engine/cuda/device/ptx/cluster.h"
#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/memory.h"
#include "engine/cuda/device/ptx/tma.h"
#include "engine/cuda/device/shared_memory/task.h"
#include "tests/cuda/litmus_arguments.h"

using namespace uniep;
using namespace uniep::cuda;
using namespace uniep::cuda::test;

namespace {

constexpr int32_t kVectors = kLitmusBytes / 16 / 32;  // of a lane and chunk

__device__ __forceinline__ uint32_t pattern(uint32_t round, uint32_t word) {
  return (round * 2654435761u) ^ (word * 2246822519u);
}

__device__ __forceinline__ ptx::Vector16 pattern_at(uint32_t round, int32_t chunk, int32_t vector) {
  ptx::Vector16 v;
  const uint32_t first = static_cast<uint32_t>(chunk * kLitmusBytes / 4 + vector * 4);
  for (uint32_t i = 0; i < 4; ++i) v.word[i] = pattern(round, first + i);
  return v;
}

__device__ __forceinline__ int32_t vector_of_lane(int32_t i) {
  return i * 32 + static_cast<int32_t>(ptx::lane_index());
}

__device__ uint32_t wrong_words(const ptx::Vector16& seen, uint32_t round, int32_t chunk, int32_t vector) {
  const ptx::Vector16 expected = pattern_at(round, chunk, vector);
  uint32_t wrong = 0;
  for (int i = 0; i < 4; ++i) wrong += seen.word[i] != expected.word[i] ? 1 : 0;
  return wrong;
}

// A whole warp, of which one lane polls. False once anybody's wait has run out.
__device__ bool wait_for(const LitmusArguments& args, const uint32_t* word, uint32_t round, bool relaxed) {
  bool holds = true;
  if (ptx::lane_index() == 0) {
    const uint64_t begin = ptx::nanoseconds();
    const auto seen = [&] { return relaxed ? ptx::load_relaxed_gpu(word) : ptx::load_acquire_system(word); };
    while (holds && static_cast<int32_t>(seen() - round) < 0) {
      if (ptx::nanoseconds() - begin > args.limit_nanoseconds) atomicExch(args.stopped, 1u);
      holds = ptx::load_relaxed_gpu(args.stopped) == 0;
    }
  }
  holds = __all_sync(0xffffffffu, holds);
  __syncwarp();
  return holds;
}

__device__ void tell(uint32_t* word, uint32_t round, bool relaxed) {
  __syncwarp();
  if (ptx::lane_index() != 0) return;
  if (relaxed) {
    *static_cast<volatile uint32_t*>(word) = round;
  } else {
    ptx::store_release_system(word, round);
  }
}

struct Staging {
  alignas(128) uint8_t bytes[2][kLitmusBytes];
  uint64_t full[2];
};

__device__ void start(Staging& staging) {
  if (ptx::lane_index() == 0) {
    for (uint64_t& full : staging.full) ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
}

// One lane's chunk into a stage.
__device__ void load_chunk(Staging& staging, int stage, const uint8_t* from) {
  if (ptx::lane_index() == 0) {
    ptx::mbarrier_arrive_expect_bytes(staging.full[stage], kLitmusBytes);
    ptx::bulk_load(ptx::shared_address(staging.bytes[stage]), from, kLitmusBytes, staging.full[stage]);
  }
}

// A round's words, to where `data` is.
__device__ void put(const LitmusArguments& args, LitmusPair& own, LitmusPair& data, Staging& staging, uint32_t round,
                    uint32_t& phase) {
  if (args.idiom == Idiom::kBulkStore) {
    for (int i = 0; i < kVectors; ++i) {
      const int32_t vector = vector_of_lane(i);
      ptx::store_shared_16(ptx::shared_address(staging.bytes[0]) + vector * 16, pattern_at(round, 0, vector));
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::lane_index() == 0) {
      ptx::bulk_store(data.data, ptx::shared_address(staging.bytes[0]), kLitmusBytes);
      ptx::bulk_commit();
      if (args.weak == 1) {
        ptx::bulk_wait_read<0>();
      } else {
        ptx::bulk_wait_complete<0>();
      }
    }
    return;
  }
  const int32_t chunks = args.idiom == Idiom::kRing ? kLitmusChunks : 1;
  uint8_t* const target = args.idiom == Idiom::kRing ? own.source : data.data;
  for (int32_t at = 0; at < chunks * kVectors; ++at) {
    const int32_t chunk = at / kVectors, vector = vector_of_lane(at % kVectors);
    ptx::store_global_16(target + chunk * kLitmusBytes + vector * 16, pattern_at(round, chunk, vector));
  }
  if (args.idiom != Idiom::kRing) return;
  ptx::fence_gpu();
  ptx::fence_proxy_async_global();
  __syncwarp();
  for (int32_t chunk = 0; chunk < kLitmusChunks; ++chunk) {
    const int stage = chunk % 2;
    // The store before the last has left the stage.
    if (args.weak != 1 && chunk >= 2 && ptx::lane_index() == 0) ptx::bulk_wait_read<1>();
    load_chunk(staging, stage, own.source + chunk * kLitmusBytes);
    ptx::mbarrier_wait(staging.full[stage], phase >> stage & 1u, "chunk");
    phase ^= 1u << stage;
    if (ptx::lane_index() == 0) {
      ptx::bulk_store(data.data + chunk * kLitmusBytes, ptx::shared_address(staging.bytes[stage]), kLitmusBytes);
      ptx::bulk_commit();
    }
  }
  if (ptx::lane_index() == 0) ptx::bulk_wait_complete<0>();
}

// How many of a round's words are wrong, as this lane sees it.
__device__ uint32_t look(const LitmusArguments& args, const LitmusPair& data, Staging& staging, uint32_t round,
                         uint32_t& phase) {
  uint32_t wrong = 0;
  if (args.idiom == Idiom::kStoreLoad) {
    for (int i = 0; i < kVectors; ++i) {
      const int32_t vector = vector_of_lane(i);
      wrong += wrong_words(ptx::load_global_16_once(data.data + vector * 16), round, 0, vector);
    }
    return wrong;
  }
  if (args.weak != 1 || args.idiom == Idiom::kBulkStore || args.idiom == Idiom::kRing) {
    ptx::fence_proxy_async_global();
  }
  const int32_t chunks = args.idiom == Idiom::kRing ? kLitmusChunks : 1;
  for (int32_t chunk = 0; chunk < chunks; ++chunk) {
    ptx::fence_proxy_async_shared();  // what was read of the stage, before it is loaded again
    __syncwarp();
    load_chunk(staging, 0, data.data + chunk * kLitmusBytes);
    ptx::mbarrier_wait(staging.full[0], phase & 1u, "words");
    phase ^= 1u;
    for (int i = 0; i < kVectors; ++i) {
      const int32_t vector = vector_of_lane(i);
      const ptx::Vector16 seen = ptx::load_shared_16(ptx::shared_address(staging.bytes[0]) + vector * 16);
      wrong += wrong_words(seen, round, chunk, vector);
    }
    __syncwarp();
  }
  return wrong;
}

// Moves words between the ranks' memories until all pairs of this GPU are through.
__device__ void make_traffic(const LitmusArguments& args, int32_t index, int32_t ctas) {
  const int32_t rank = args.first_rank;
  const int64_t vectors = args.load_words / 4;
  while (ptx::load_relaxed_gpu(args.finished) < static_cast<uint32_t>(args.pairs * args.ranks)) {
    for (int64_t i = index * 32 + ptx::lane_index(); i < vectors; i += ctas * 32) {
      const ptx::Vector16 v = ptx::load_global_16_once(args.load[rank][1 - rank] + i * 4);
      ptx::store_global_16(args.load[rank][1 - rank] + (vectors + i) * 4, v);
    }
  }
}

// The next length of a pause, mostly none.
__device__ void pause(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  __nanosleep((state >> 28) == 0 ? state >> 8 & 4095u : 0);
}

}  // namespace

// One warp a CTA: rank after rank a CTA a pair, then those that make traffic.
extern "C" __global__ void litmus_pairs(const __grid_constant__ LitmusArguments args) {
  __shared__ Staging staging;
  const int32_t working = args.pairs * args.ranks, block = static_cast<int32_t>(blockIdx.x);
  if (block >= working) return make_traffic(args, block - working, static_cast<int32_t>(gridDim.x) - working);
  start(staging);
  const int32_t rank = args.first_rank + block / args.pairs, pair = block % args.pairs;
  LitmusPair& own = args.memory[rank][rank][pair];
  LitmusPair& peer = args.memory[rank][1 - rank][pair];
  const bool pulls = args.idiom == Idiom::kPull, produces = rank == args.producer;
  uint32_t phase = 0, wrong = 0, random = static_cast<uint32_t>(block) * 40503u + args.first_round;
  for (uint32_t round = args.first_round; round != args.first_round + args.rounds; ++round) {
    pause(random);
    if (produces) {
      if (!wait_for(args, &own.ack, round - 1, false)) break;
      put(args, own, pulls ? own : peer, staging, round, phase);
      tell(&peer.flag, round, args.weak == 2);
    } else {
      if (!wait_for(args, &own.flag, round, args.weak == 3)) break;
      wrong += look(args, pulls ? peer : own, staging, round, phase);
      tell(&peer.ack, round, false);
    }
  }
  if (wrong > 0) atomicAdd(args.wrong, static_cast<unsigned long long>(wrong));
  __syncwarp();
  if (ptx::lane_index() == 0) atomicAdd(args.finished, 1u);
}

// Clusters of two. The first warp of the first CTA publishes records, a lane a CTA; the second warp of each reads them.
extern "C" __global__ void litmus_cluster(const __grid_constant__ LitmusArguments args) {
  using Ring = TaskRing<Task, 3>;
  __shared__ Ring tasks;
  const uint32_t cta = ptx::cluster_rank(), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Ring::kSlots; ++slot) {
      ptx::mbarrier_init(tasks.full[slot], 1);
      ptx::mbarrier_init(tasks.empty[slot], 2);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_barrier();
  uint32_t wrong = 0, random = blockIdx.x * 64 + threadIdx.x / 32 + args.first_round;
  TaskCursor<Ring, 2> ring(tasks);
  const auto record = [&](uint32_t round, uint32_t of_cta) {
    return __builtin_bit_cast(Task, pattern_at(round, 0, static_cast<int32_t>(of_cta)));
  };
  for (uint32_t round = args.first_round; round != args.first_round + args.rounds; ++round) {
    if (warp == 0 && cta == 0) {
      pause(random);
      if (ptx::lane_index() < 2) ring.publish(record(round, ptx::lane_index()), ptx::lane_index());
      __syncwarp();
    } else if (warp == 1) {
      pause(random);
      ptx::Vector16 seen{};
      if (args.weak == 1) {  // reads what is there, and waits behind it
        seen = ptx::load_shared_16(ptx::shared_address(&tasks.records[ring.slot()]));
        ring.take_by_warp();
      } else {
        seen = __builtin_bit_cast(ptx::Vector16, ring.take_by_warp());
      }
      wrong += wrong_words(seen, round, 0, static_cast<int32_t>(cta));
    }
  }
  if (wrong > 0) atomicAdd(args.wrong, static_cast<unsigned long long>(wrong));
  ptx::cluster_barrier();
}
