#pragma once

#include <memory>
#include <vector>

#include "engine/cuda/device/arguments/gemm_arguments.h"
#include "engine/cuda/runtime/run_time_compiler.h"

namespace uniep::cuda {

GemmConfig default_config(Layout layout, Epilogue epilogue);

// Every layout and epilogue that the library uses, with its default tile.
std::vector<GemmConfig> default_configs();

// The most stages that fit into shared memory, at most 8.
int largest_stages(const GemmConfig& config);
// The fewest stages: two, but one for each 64 columns of dSwiGLU's last tile (device/epilogue/last_z.h).
int fewest_stages(const GemmConfig& config);

// Throws uniep::Error (kInvalidArgument) that names the rule a configuration breaks.
void require_legal(const GemmConfig& config);

// Tables in the kernel's arguments come in few sizes, so that few kernels are compiled: 1, 8, 16, 32, ... >= count.
int table_capacity(int count);

KernelRequest gemm_request(const GemmConfig& config);
KernelRequest prob_sum_request();

// The byte oracle of the tests.
KernelRequest naive_request(const char* function);

// The kernel's argument: GemmKernelArguments<config.maps, config.outputs>.
class ArgumentBlock {
 public:
  explicit ArgumentBlock(size_t bytes) : words_((bytes + sizeof(Word) - 1) / sizeof(Word)) {}
  void* data() const { return const_cast<Word*>(words_.data()); }

 private:
  struct alignas(64) Word {
    unsigned char bytes[64];
  };
  std::vector<Word> words_;
};

ArgumentBlock argument_block(const GemmConfig& config, const GemmArguments& arguments,
                             const std::vector<TensorMap>& maps, const std::vector<void*>& outputs);

}  // namespace uniep::cuda
