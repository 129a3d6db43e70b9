#pragma once

#include "engine/cuda/device/epilogue/epilogue.h"
#include "engine/cuda/device/epilogue/epilogue_swiglu.h"
#include "engine/cuda/device/epilogue/last_z.h"
#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/tma.h"

namespace uniep::cuda {

// What dSwiGLU reads and writes in a standalone kernel; the megakernel's is in layer_gradient.h.
class StandaloneGradient {
 public:
  UNIEP_DEVICE StandaloneGradient(const GemmArguments& arguments) : arguments_(arguments) {}

  UNIEP_DEVICE const TensorMap& z() const { return arguments_.z; }
  UNIEP_DEVICE const TensorMap& dz() const { return arguments_.dz; }
  UNIEP_DEVICE const TensorMap& activation() const { return arguments_.recomputed; }
  UNIEP_DEVICE int32_t columns() const { return arguments_.n_extent; }
  UNIEP_DEVICE float* prob_sums(int32_t chunk) const { return arguments_.prob_chunks + chunk * arguments_.prob_stride; }
  UNIEP_DEVICE float prob(const WarpTile& tile, int32_t row) const { return row_prob(arguments_, tile, row); }
  // One lane, before a tile's first transfer: until what the last one stored has left shared memory.
  UNIEP_DEVICE void begin_tile(uint32_t& /*calls*/) const { ptx::bulk_wait_read<0>(); }
  // One lane, at the end.
  UNIEP_DEVICE void end_tiles(uint32_t /*calls*/) const { ptx::bulk_wait_read<0>(); }

 private:
  const GemmArguments& arguments_;
};

// FC2's dgrad: from da (fp32, the accumulators) and z: a again, dz, and dprob's sums of 64 columns.
//
// All of it is a deferred epilogue, from a copy of the accumulators in registers: chunks of 64 columns, each in four
// steps of 16 columns and one that ends the chunk's sum. z, dz and a move by TMA, 32 columns at a time, so that no math
// warp waits for memory: z comes into one of two buffers while the other is worked on, across tiles; dz takes its place
// and leaves from there, beside a. The last tile's z comes through the stages (last_z.h).
//
// A tile that does not exist lies beyond the last column, where TMA reads zero and writes nothing. A row that does not
// exist gets z, da and prob of +0, from which every result is +0.
template <GemmConfig kConfig, typename Gradient>
class SwigluGradientEpilogue {
 public:
  static constexpr int kCount = kConfig.tile_n / 2;
  static constexpr int kChunks = kConfig.tile_n / kProbColumns;
  static constexpr int kStripsInChunk = kProbColumns / kStripColumns;
  static constexpr int kStepsInGroup = kStripsInChunk + 1;
  static constexpr int kSteps = kChunks * kStepsInGroup;
  static constexpr bool kRolled = true;
  static constexpr int kStripRegisters = kStripColumns / 2;
  static constexpr int kChunkRegisters = kProbColumns / 2;
  // The megakernel's math warps have fewer registers, and SwiGLU with parameters takes one more.
  static constexpr bool kShaped = kConfig.expert.activation == ActivationKind::kShapedSwiglu;
  static constexpr int kParked = kConfig.in_layer ? (kShaped ? 7 : 6) : 4;
  static constexpr int kHeld = kCount - kParked;
  static constexpr bool kGated = kConfig.expert.gated();
  // The derivatives of the others with a gate hold more at once than SwiGLU's: then half a strip at a time, for want of
  // registers.
  static constexpr bool kInHalves =
      kGated && (kConfig.expert.activation != ActivationKind::kSwiglu || kConfig.expert.weighs_z);
  static constexpr bool kByFragment = kShaped && kConfig.expert.weighs_z;
  static_assert(kProbColumns == 2 * kTransferColumns && kTransferColumns == 2 * kStripColumns,
                "a chunk takes both buffers in turn, two strips each");

  UNIEP_DEVICE SwigluGradientEpilogue(const Gradient& gradient, uint32_t staging)
      : gradient_(gradient), staging_(staging) {
    if (ptx::lane_index() == 0) {
      for (int buffer = 0; buffer < kBuffers; ++buffer) ptx::mbarrier_init(full(buffer), 1);
      ptx::fence_mbarrier_init();
      calls() = 0;
      fetch(0, WarpTile::kBeyond, 0);
    }
    __syncwarp();
  }

  // Between the K blocks of the next tile: 16 columns.
  template <int kStrip>
  UNIEP_DEVICE void step(const WarpTile& next) {
    constexpr int32_t kBuffer = kStrip / kStripsInTransfer;
    constexpr bool kBegins = kStrip % kStripsInTransfer == 0;
    if constexpr (kBegins) begin_transfer(next, kBuffer);
    run_strip<kStrip>(gate_block(kBuffer), activation_block());
    if constexpr (!kBegins) end_transfer(kBuffer, gate_block(kBuffer), activation_block());
  }

  // After the strips of a chunk.
  UNIEP_DEVICE void end_group(const WarpTile& /*next*/) {
    end_chunk();
    phase_ ^= 1;
  }

  // All that the last tile left over. Beside no mainloop it counts how long a strip takes, so two are under way.
  UNIEP_DEVICE void run_alone(SharedStorage<kConfig>& shared, StageCursor<kConfig.pipeline_stages> cursor) {
    ptx::mbarrier_wait(full(0), phase_, "z");  // which the last step asked for; not used
    ptx::bulk_wait_read<0>();
    __syncwarp();
    const uint32_t warp = ptx::warp_uniform(staging_ - ptx::shared_address(shared.staging[0])) / staging_bytes(kConfig);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk, cursor.advance()) {
      ptx::mbarrier_wait(shared.full[cursor.stage], cursor.phase, "the last z");
      const uint32_t stage = ptx::warp_uniform(cursor.stage);
      run_transfer<0>(last_z<kConfig>(shared, stage, warp, 0), activation_block());
      run_transfer<1>(last_z<kConfig>(shared, stage, warp, 1), gate_block(0));
      end_chunk();
    }
    __syncwarp();  // all lanes have stored their sums
    if (ptx::lane_index() == 0) gradient_.end_tiles(calls());
    __syncwarp();
  }

  // After run_alone(), where the staging's memory becomes another GEMM's.
  UNIEP_DEVICE void leave() const {
    if (ptx::lane_index() == 0) {
      for (int buffer = 0; buffer < kBuffers; ++buffer) ptx::mbarrier_invalidate(full(buffer));
    }
  }

  UNIEP_DEVICE void finish(const WarpTile& tile, const float (&d)[kCount]) {
    row_ = tile.row;
    column_ = tile.column;
    rows_ = tile.rows;
    chunk_ = 0;
    const int32_t row = static_cast<int32_t>(ptx::lane_index()) / 4;
    if constexpr (kShaped) {
      const int32_t lane = static_cast<int32_t>(ptx::lane_index());
      if (lane < kBlockRows) probs()[lane] = gradient_.prob(tile, lane);
      __syncwarp();
    } else {
      prob_[0] = gradient_.prob(tile, row);
      prob_[1] = gradient_.prob(tile, row + 8);
    }
    // This mask is also what makes copies: were the kept values still accumulators for the compiler, the next mainloop
    // would have to wait for the last use of each (ptxas then serialises wgmma, C7520).
    const uint32_t exists[2] = {row < tile.rows ? ~0u : 0u, row + 8 < tile.rows ? ~0u : 0u};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) da_[i] = float_from_bits(bits_of_float(d[i]) & exists[i / 2 % 2]);
    park(d, exists);
  }

 private:
  static constexpr int kBuffers = 2;
  static constexpr int kStripsInTransfer = kTransferColumns / kStripColumns;
  // Gate and up of each buffer, a, what waits for registers, the barriers.
  static constexpr uint32_t kActivationAt = 2 * kBuffers * kTransferBytes;
  static constexpr uint32_t kParkedAt = kActivationAt + kTransferBytes;
  static constexpr uint32_t kBarriersAt = kParkedAt + kParked * 4 * ptx::kThreadsPerWarp;
  static constexpr uint32_t kCallsAt = kBarriersAt + kBuffers * 8;
  static constexpr uint32_t kProbsAt = kCallsAt + 4;  // of the warp's rows
  static constexpr uint32_t kEnd = kProbsAt + (kShaped ? kBlockRows * 4 : 0);
  static_assert(kEnd <= staging_bytes(kConfig), "the staging is too small");
  static_assert(staging_bytes(kConfig) % 512 == 0, "the 64-byte swizzle repeats after 512 bytes");

  // 16 rows of as many columns: fragments of gate and up, in the end of dz; and of a. Without a gate `up` is not used.
  struct Strip {
    uint32_t gate[4];
    uint32_t up[4];
    uint32_t a[4];
  };

  // 16-byte chunk c of row r, as the 64-byte swizzle puts it: neither side has bank conflicts.
  UNIEP_DEVICE static uint32_t place_of(uint32_t row, uint32_t chunk) {
    return row * (kTransferColumns * 2) + ((chunk ^ (row / 2 & 3u)) << 4);
  }
  UNIEP_DEVICE uint32_t gate_block(int32_t buffer) const {
    return staging_ + buffer * 2 * kTransferBytes;
  }
  UNIEP_DEVICE uint32_t activation_block() const {
    return staging_ + kActivationAt;
  }
  UNIEP_DEVICE uint64_t& full(int32_t buffer) const {
    return *static_cast<uint64_t*>(__cvta_shared_to_generic(staging_ + kBarriersAt + buffer * 8));
  }

  // Of Gradient::begin_tile(); one lane's.
  UNIEP_DEVICE uint32_t& calls() const {
    return *static_cast<uint32_t*>(__cvta_shared_to_generic(staging_ + kCallsAt));
  }

  // Of the rows, where registers are too few for them. Volatile, so that no copy stays in a register.
  UNIEP_DEVICE volatile float* probs() const {
    return static_cast<volatile float*>(__cvta_shared_to_generic(staging_ + kProbsAt));
  }
  UNIEP_DEVICE float prob_of(int half) const {
    if constexpr (kShaped) return probs()[ptx::lane_index() / 4 + half * 8];
    return prob_[half];
  }

  // The last few values wait in shared memory, for want of registers: four of each lane, then two, then one.
  UNIEP_DEVICE uint32_t parked(int32_t first) const {
    return staging_ + kParkedAt + first * 4 * ptx::kThreadsPerWarp +
           ptx::lane_index() * (first == 0   ? 16
                                : first == 4 ? 8
                                             : 4);
  }
  UNIEP_DEVICE void park(const float (&d)[kCount], const uint32_t (&exists)[2]) {
    const auto value = [&](int i) { return bits_of_float(d[kHeld + i]) & exists[(kHeld + i) / 2 % 2]; };
    ptx::store_shared_16(parked(0), {value(0), value(1), value(2), value(3)});
    if constexpr (kParked >= 6) ptx::store_shared_8(parked(4), value(4), value(5));
    if constexpr (kParked == 7) *last_parked() = value(6);
  }
  UNIEP_DEVICE void unpark() {
    const ptx::Vector16 values = ptx::load_shared_16(parked(0));
#pragma unroll
    for (int i = 0; i < 4; ++i) da_[kChunkRegisters - kParked + i] = float_from_bits(values.word[i]);
    if constexpr (kParked >= 6) {
      uint32_t low, high;
      ptx::load_shared_8(parked(4), low, high);
      da_[kChunkRegisters - kParked + 4] = float_from_bits(low);
      da_[kChunkRegisters - kParked + 5] = float_from_bits(high);
    }
    if constexpr (kParked == 7) da_[kChunkRegisters - 1] = float_from_bits(*last_parked());
  }
  UNIEP_DEVICE uint32_t* last_parked() const {
    return static_cast<uint32_t*>(__cvta_shared_to_generic(parked(6)));
  }

  // One lane.
  UNIEP_DEVICE void fetch(int32_t row, int32_t column, int32_t buffer) const {
    uint64_t& barrier = full(buffer);
    ptx::mbarrier_arrive_expect_bytes(barrier, kTransferBoxBytes<kConfig>);
    ptx::tma_load_3d(gate_block(buffer), gradient_.z(), barrier, {column, row, 0});
  }

  // What the last transfer left from is free when it has been read: then the next one's z comes into its buffer.
  UNIEP_DEVICE void begin_transfer(const WarpTile& next, int32_t buffer) {
    if (ptx::lane_index() == 0) {
      const bool same_chunk = buffer == 0;
      if (same_chunk && chunk_ == 0) {
        gradient_.begin_tile(calls());
      } else {
        ptx::bulk_wait_read<0>();
      }
      const bool same_tile = same_chunk || chunk_ + 1 < kChunks;
      const int32_t column = column_ + (same_chunk ? kTransferColumns : kProbColumns);
      fetch(same_tile ? row_ : next.row, same_tile ? column : next.column, 1 - buffer);
    }
    __syncwarp();
    ptx::mbarrier_wait(full(buffer), phase_, "z");
  }

  UNIEP_DEVICE void end_transfer(int32_t half, uint32_t dz, uint32_t activation) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::lane_index() == 0) {
      const int32_t column = column_ + half * kTransferColumns;
      ptx::tma_store_3d(gradient_.dz(), dz, column, row_, 0);
      ptx::tma_store_3d(gradient_.activation(), activation, column, row_, 0);
      ptx::bulk_commit();
    }
    __syncwarp();
  }

  // A whole transfer at once. a may still leave from `activation`, where the last transfer but one put it.
  template <int kHalf>
  UNIEP_DEVICE void run_transfer(uint32_t z, uint32_t activation) {
    constexpr int kLow = kHalf * kStripsInTransfer;
    if constexpr (kInHalves) {
      if (ptx::lane_index() == 0) ptx::bulk_wait_read<1>();
      __syncwarp();
      run_strip<kLow>(z, activation);
      run_strip<kLow + 1>(z, activation);
      end_transfer(kHalf, z, activation);
      return;
    }
    Strip low = load_strip<kLow>(z);
    Strip high = load_strip<kLow + 1>(z);
    compute_strip<kLow>(low);
    compute_strip<kLow + 1>(high);
    if (ptx::lane_index() == 0) ptx::bulk_wait_read<1>();
    __syncwarp();
    store_strip<kLow>(low, z, activation);
    store_strip<kLow + 1>(high, z, activation);
    end_transfer(kHalf, z, activation);
  }

  template <int kStrip>
  UNIEP_DEVICE void run_strip(uint32_t z, uint32_t activation) {
    if constexpr (kInHalves) {
      run_strip_in_halves<kStrip>(z, activation);
      return;
    }
    Strip strip = load_strip<kStrip>(z);
    compute_strip<kStrip>(strip);
    store_strip<kStrip>(strip, z, activation);
  }

  // 8 columns of gate beside the same of up, in one fragment of each width; dz of the first 8 is back in shared memory
  // when the second 8 come, which keeps the compiler from holding both.
  template <int kStrip>
  UNIEP_DEVICE void run_strip_in_halves(uint32_t z, uint32_t activation) {
    const uint32_t lane = ptx::lane_index();
    const uint32_t part = z + lane / 16 * kTransferBytes;
    uint32_t a[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kByFragment) {
        run_fragment<kStrip>(z, a[2 * half], half, 0);
        run_fragment<kStrip>(z, a[2 * half + 1], half, 1);
        continue;
      }
      const uint32_t address = part + place_of(lane % 16, 2 * (kStrip % kStripsInTransfer) + half);
      uint32_t gate[2], up[2];
      ptx::load_matrix_x4(address, gate[0], gate[1], up[0], up[1]);
      if (rows_ < kBlockRows) clear_padding(gate, up);
      compute_fragments<kStrip * kStripRegisters>(gate, up, a + 2 * half, half);
      ptx::store_matrix_x4(address, gate[0], gate[1], up[0], up[1]);
    }
    ptx::store_matrix_x4(activation + place_of_lane<kStrip>(), a[0], a[1], a[2], a[3]);
  }

  // Of gate and up the strip's fragment 2 * half + i alone, a word a lane: dz of one is back when the next one comes.
  template <int kStrip>
  UNIEP_DEVICE void run_fragment(uint32_t z, uint32_t& a, int half, int i) {
    const uint32_t lane = ptx::lane_index();
    const uint32_t address = z + place_of(lane / 4 + 8 * i, 2 * (kStrip % kStripsInTransfer) + half) + lane % 4 * 4;
    uint32_t gate = ptx::load_shared_4(address), up = ptx::load_shared_4(address + kTransferBytes);
    if (static_cast<int32_t>(lane) / 4 + 8 * i >= rows_) gate = up = 0;
    compute_fragment(gate, up, a, kStrip * kStripRegisters + 4 * half + 2 * i, i);
    ptx::store_shared_4(address, gate);
    ptx::store_shared_4(address + kTransferBytes, up);
  }

  UNIEP_DEVICE void compute_fragment(uint32_t& gate, uint32_t& up, uint32_t& a, int at, int i) {
    const auto expert = expert_activation<kConfig.expert>();
    const float prob = prob_of(i);
    const ActivationGradient low = expert.gradient(unpack_low(gate), unpack_low(up), prob, da_[at]);
    const ActivationGradient high = expert.gradient(unpack_high(gate), unpack_high(up), prob, da_[at + 1]);
    a = pack_bfloat16(low.activation, high.activation);
    gate = pack_bfloat16(low.gate, high.gate);
    up = pack_bfloat16(low.up, high.up);
    prob_sum_[i] = expert.add_prob(prob_sum_[i], da_[at], low.prob_term);
    prob_sum_[i] = expert.add_prob(prob_sum_[i], da_[at + 1], high.prob_term);
  }

  // As compute_strip(), of the strip's fragments 2 * half and 2 * half + 1.
  template <int kValues>
  UNIEP_DEVICE void compute_fragments(uint32_t (&gate)[2], uint32_t (&up)[2], uint32_t* a, int half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) compute_fragment(gate[i], up[i], a[i], kValues + 4 * half + 2 * i, i);
  }

  template <int kStrip>
  UNIEP_DEVICE static uint32_t place_of_lane() {
    const uint32_t lane = ptx::lane_index();
    return place_of(lane % 16, 2 * (kStrip % kStripsInTransfer) + lane / 16);
  }

  template <int kStrip>
  UNIEP_DEVICE Strip load_strip(uint32_t z) const {
    const uint32_t address = z + place_of_lane<kStrip>();
    Strip s;
    ptx::load_matrix_x4(address, s.gate[0], s.gate[1], s.gate[2], s.gate[3]);
    if constexpr (kGated) {
      ptx::load_matrix_x4(address + kTransferBytes, s.up[0], s.up[1], s.up[2], s.up[3]);
    } else {
      s.up[0] = s.up[1] = s.up[2] = s.up[3] = 0;
    }
    if (rows_ < kBlockRows) clear_padding(s.gate, s.up);
    return s;
  }

  template <int kStrip>
  UNIEP_DEVICE void compute_strip(Strip& s) {
    constexpr int kValues = kStrip * kStripRegisters;
    const auto expert = expert_activation<kConfig.expert>();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float prob = prob_[i % 2];
      const float da_low = da_[kValues + 2 * i];
      const float da_high = da_[kValues + 2 * i + 1];
      const ActivationGradient low = expert.gradient(unpack_low(s.gate[i]), unpack_low(s.up[i]), prob, da_low);
      const ActivationGradient high = expert.gradient(unpack_high(s.gate[i]), unpack_high(s.up[i]), prob, da_high);
      s.a[i] = pack_bfloat16(low.activation, high.activation);
      s.gate[i] = pack_bfloat16(low.gate, high.gate);
      s.up[i] = pack_bfloat16(low.up, high.up);
      prob_sum_[i % 2] = expert.add_prob(prob_sum_[i % 2], da_low, low.prob_term);
      prob_sum_[i % 2] = expert.add_prob(prob_sum_[i % 2], da_high, high.prob_term);
    }
  }

  template <int kStrip>
  UNIEP_DEVICE void store_strip(const Strip& s, uint32_t dz, uint32_t activation) const {
    const uint32_t place = place_of_lane<kStrip>();
    ptx::store_matrix_x4(dz + place, s.gate[0], s.gate[1], s.gate[2], s.gate[3]);
    if constexpr (kGated) ptx::store_matrix_x4(dz + kTransferBytes + place, s.up[0], s.up[1], s.up[2], s.up[3]);
    ptx::store_matrix_x4(activation + place, s.a[0], s.a[1], s.a[2], s.a[3]);
  }

  // What lies in z's padding is anybody's.
  template <int kFragments>
  UNIEP_DEVICE void clear_padding(uint32_t (&gate)[kFragments], uint32_t (&up)[kFragments]) const {
    const int32_t row = static_cast<int32_t>(ptx::lane_index()) / 4;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const bool exists = row + i % 2 * 8 < rows_;
      gate[i] = exists ? gate[i] : 0;
      up[i] = exists ? up[i] : 0;
    }
  }

  UNIEP_DEVICE void end_chunk() {
    write_prob_sum();
    column_ += kProbColumns;
    ++chunk_;
    prob_sum_[0] = prob_sum_[1] = 0.0f;
    rotate_registers<kChunkRegisters>(da_);
    if (chunk_ == kChunks - 1) unpark();
  }

  UNIEP_DEVICE void write_prob_sum() {
    const int32_t lane = static_cast<int32_t>(ptx::lane_index());
    float* const sums = gradient_.prob_sums(column_ / kProbColumns) + row_;
    const bool exists = column_ < gradient_.columns();  // the chunk's first column, if any
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      // Lane q of a quad holds partial q: (p0 + p1) + (p2 + p3).
      const float own = prob_sum_[half];
      const float pair_sum = add(own, __shfl_xor_sync(0xffffffffu, own, 1));
      const float sum = add(pair_sum, __shfl_xor_sync(0xffffffffu, pair_sum, 2));
      ptx::store_global_float_if(lane % 4 == 0 && exists, sums + lane / 4 + half * 8, sum);
    }
  }

  const Gradient gradient_;
  const uint32_t staging_;
  int32_t row_ = 0;
  int32_t column_ = WarpTile::kBeyond;  // of the chunk
  int32_t rows_ = 0;
  int32_t chunk_ = 0;
  uint32_t phase_ = 0;  // of both buffers' barriers in this chunk
  float prob_[2] = {};
  float prob_sum_[2] = {};
  float da_[kHeld];
};

}  // namespace uniep::cuda
