#pragma once

#include "model/activation.h"
#include "program/kernel_memory.h"

// What a grouped GEMM kernel is compiled for. Shared by the host, which chooses it, and the device code.
namespace uniep::cuda {

// Rows are expert rows: each expert's segment starts at a multiple of 128 rows.
// kForward:  D[rows, N]  = A[rows, K] B[e][N, K]^T
// kDgrad:    D[rows, N]  = A[rows, K] B[e][K, N]
// kWgrad:    D[e][M, N]  = A[rows of e, M]^T B[rows of e, N]
enum class Layout : int { kForward = 0, kDgrad = 1, kWgrad = 2 };

// kSwiglu:         D is z (N = 2 I); writes a = silu(z_gate) z_up prob from the rounded z, and z if asked.
// kSwigluGradient: D is da (N = I); reads z, writes a, dz and the 64-column sums of dprob.
// kLayer:          the megakernel's: a tile of FC1 is kSwiglu's, a tile of FC2 or dgrad FC1 goes to its rows' slots.
// In the megakernel both are any activation's; without a gate z and dz have I columns, and a tile of FC1 is as many.
enum class Epilogue : int {
  kBFloat16 = 0,
  kFloat32 = 1,
  kAccumulate = 2,
  kSwiglu = 3,
  kSwigluGradient = 4,
  kLayer = 5
};

constexpr int kGemmThreads = 128 * (1 + kMathWarpgroups);
constexpr int kTaskSlots = 4;
// One task running, one being stored, one to come: a dynamic queue should not deal earlier than it must.
constexpr int kLayerTaskSlots = 3;
// A CTA is launched with the same number of registers for every thread, a multiple of 8; what the math warps take has
// to come from the producers, or they wait for it for ever.
constexpr int kLaunchRegisters = 65536 / kGemmThreads / 8 * 8;
constexpr bool registers_are_there(int producer, int math) {
  return producer + kMathWarpgroups * math <= (1 + kMathWarpgroups) * kLaunchRegisters;
}
constexpr int kProducerRegisters = 56;  // of the megakernel, whose copy warps sum rows
constexpr int kMathRegisters = 224;
constexpr int kGemmProducerRegisters = 40;  // of the standalone kernel
constexpr int kGemmMathRegisters = 232;
static_assert(registers_are_there(kProducerRegisters, kMathRegisters) &&
                  registers_are_there(kGemmProducerRegisters, kGemmMathRegisters),
              "the math warps would wait for registers that the CTA does not have");

// What the layer's epilogues compute between FC1 and FC2. Parameters as bits, which may be template arguments.
struct ExpertConfig {
  ActivationKind activation = ActivationKind::kSwiglu;
  bool weighs_z = false;       // the router's weight multiplies z,
  bool weighs_output = false;  // or o: FC1 leaves it out, FC2 has it
  bool bias = false;           // z and o have one, forward
  uint32_t alpha = 0;
  uint32_t gate_limit = 0;
  uint32_t up_limit = 0;
  uint32_t up_offset = 0;

  UNIEP_HOST_DEVICE constexpr bool gated() const { return has_gate(activation); }

  constexpr bool operator==(const ExpertConfig&) const = default;
};

struct GemmConfig {
  Layout layout = Layout::kForward;
  Epilogue epilogue = Epilogue::kBFloat16;
  int tile_n = 256;  // 128 or 256 columns of D; kSwigluGradient: 128 or 192
  int pipeline_stages = 4;
  int cluster = 2;  // CTAs that share a tile of B: 1 or 2
  int maps = 1;     // tensor maps of B: 1, or one an expert
  int outputs = 1;  // output addresses: 1, or one an expert (wgrad)
  // The megakernels' copy warp has a ring of chunks; the standalone kernel keeps it free.
  int ring_stage_bytes = kStandaloneChunkBytes;
  int copy_stages = kStandaloneCopyStages;
  bool in_layer = false;  // the megakernel's: its records, and room for the call
  int operand_bytes = 0;  // at least, of the stages and the staging: another GEMM of the kernel takes so many
  ExpertConfig expert = {};

  constexpr bool operator==(const GemmConfig&) const = default;
};

// Each math warp's private staging: a block of 16 x 64 bf16 values, or strips of 16 x 16; dSwiGLU has more.
UNIEP_HOST_DEVICE constexpr int staging_bytes(const GemmConfig& config) {
  return config.epilogue == Epilogue::kSwigluGradient ? kGradientStagingBytes : kStagingBlockBytes;
}

// fp32 weight gradients leave through stages that the loader lends the math warps behind a tile's last K block: boxes
// of 128 rows x 32 columns, as many in a stage as fit into its tile of B and one into its tile of A. Where gradients
// are added, the loader has filled them with the old values.
constexpr int kLentColumns = 32;
constexpr int kLentBoxBytes = kTileM * kLentColumns * 4;
UNIEP_HOST_DEVICE constexpr bool lends_stages(const GemmConfig& config) {
  return config.layout == Layout::kWgrad &&
         (config.epilogue == Epilogue::kFloat32 || config.epilogue == Epilogue::kAccumulate);
}
UNIEP_HOST_DEVICE constexpr int lent_boxes_of_stage(const GemmConfig& config) {
  return config.tile_n * kTileK * 2 / kLentBoxBytes + 1;
}
UNIEP_HOST_DEVICE constexpr int lent_stages(const GemmConfig& config) {
  return (config.tile_n / kLentColumns + lent_boxes_of_stage(config) - 1) / lent_boxes_of_stage(config);
}
// Tensor maps of D, for TMA: as many as there are outputs.
UNIEP_HOST_DEVICE constexpr int output_maps(const GemmConfig& config) {
  return lends_stages(config) ? config.outputs : 0;
}

// What an epilogue leaves over for between the next tile's K blocks (see epilogue/epilogue.h): bf16 writes 64 columns
// after each of the first K blocks; SwiGLU and dSwiGLU do 16 columns a step, spread over all K blocks, dSwiGLU with a
// fifth step for every 64; the layer does 16 columns of gate and up, or 32 of FC2, or of z
// without a gate.
UNIEP_HOST_DEVICE constexpr int deferred_steps(const GemmConfig& config) {
  if (config.epilogue == Epilogue::kBFloat16) return config.tile_n / 64;
  if (config.epilogue == Epilogue::kSwiglu || config.epilogue == Epilogue::kLayer) return config.tile_n / 2 / 16;
  return config.epilogue == Epilogue::kSwigluGradient ? config.tile_n / 64 * 5 : 0;
}
constexpr int kLayerSpacing = 4;  // K blocks between two steps at most: other tiles wait for what they store
// The fewest K blocks that this takes. Forward and dgrad run at least that many: beyond K both operands are read as
// zero.
UNIEP_HOST_DEVICE constexpr int interleaved_blocks(const GemmConfig& config) {
  if (config.epilogue == Epilogue::kBFloat16) return deferred_steps(config);
  return 1 + deferred_steps(config);
}

// The two loads that a stage's tile of B takes, one by each CTA of a cluster if they share it, are halves of its
// columns, or of K where half the columns are no whole number of boxes. (Forward: always halves of the columns.)
UNIEP_HOST_DEVICE constexpr bool split_b_along_k(const GemmConfig& config) {
  return config.tile_n % 128 != 0;
}

// K rows of the boxes that make up a K block in which W1's gate rows end and its up rows begin, where they lie apart. I
// is a multiple of it, and it is a swizzle's period.
constexpr int kFewDepthRows = 8;

UNIEP_HOST_DEVICE constexpr int stage_bytes(const GemmConfig& config) {
  return pipeline_stage_bytes(config.tile_n);
}

// Stages and staging; and what of a kernel's is left over by them.
UNIEP_HOST_DEVICE constexpr int operand_bytes(const GemmConfig& config) {
  return config.pipeline_stages * stage_bytes(config) + kMathWarps * staging_bytes(config);
}
UNIEP_HOST_DEVICE constexpr int spare_bytes(const GemmConfig& config) {
  const int bytes = operand_bytes(config);
  return config.operand_bytes > bytes ? config.operand_bytes - bytes : 0;
}

UNIEP_HOST_DEVICE constexpr int shared_memory_bytes(const GemmConfig& config) {
  return gemm_kernel_bytes(config.tile_n, config.pipeline_stages, staging_bytes(config),
                           copy_ring_bytes(config.ring_stage_bytes, config.copy_stages) + spare_bytes(config),
                           config.in_layer ? kCallBytes : 0);
}

}  // namespace uniep::cuda
