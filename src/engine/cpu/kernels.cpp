#include "engine/cpu/kernels.h"

#include <cfenv>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>

#include "engine/cpu/kernels_tables.h"
#include "uniep/error.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace uniep::cpu {

namespace {

constexpr InstructionSet kAllSets[] = {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512};
constexpr std::align_val_t kAlignment{64};

InstructionSet best_supported() {
  InstructionSet best = InstructionSet::kPortable;
  for (const InstructionSet set : kAllSets) {
    if (is_supported(set)) best = set;
  }
  return best;
}

void require_supported(InstructionSet set, const std::string& who) {
  if (is_supported(set)) return;
  throw Error(Status::kUnsupported, who + " is " + instruction_set_name(set) + ", but this CPU supports at most " +
                                        instruction_set_name(best_supported()));
}

}  // namespace

const char* instruction_set_name(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable:
      return "portable";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool is_supported(InstructionSet set) {
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (set == InstructionSet::kAvx2) return avx2;
  if (set == InstructionSet::kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return set == InstructionSet::kPortable;
}

InstructionSet best_instruction_set() {
  const char* wanted = std::getenv("UNIEP_INSTRUCTION_SET");
  if (wanted == nullptr || *wanted == '\0') return best_supported();
  for (const InstructionSet set : kAllSets) {
    if (std::string(wanted) != instruction_set_name(set)) continue;
    require_supported(set, "UNIEP_INSTRUCTION_SET");
    return set;
  }
  throw Error(Status::kInvalidArgument,
              "UNIEP_INSTRUCTION_SET is '" + std::string(wanted) + "', legal are portable, avx2 and avx512");
}

const Kernels& kernels(InstructionSet set) {
  require_supported(set, "the instruction set of the kernels");
#ifdef __x86_64__
  if (set == InstructionSet::kAvx2) return kAvx2Kernels;
  if (set == InstructionSet::kAvx512) return kAvx512Kernels;
#endif
  return kPortableKernels;
}

float* GemmScratch::reserve(int64_t count) {
  if (count > count_) {
    memory_.reset();  // first, so that old and new do not exist together
    count_ = 0;
    void* memory = nullptr;
    if (count <= std::numeric_limits<int64_t>::max() / int64_t{sizeof(float)}) {
      memory = ::operator new(static_cast<std::size_t>(count) * sizeof(float), kAlignment, std::nothrow);
    }
    if (memory == nullptr) {
      throw Error(Status::kOutOfMemory, "no memory for " + std::to_string(count) + " floats of gemm packing buffers");
    }
    memory_.reset(static_cast<float*>(memory));
    count_ = count;
  }
  return memory_.get();
}

void GemmScratch::Release::operator()(float* memory) const {
  ::operator delete(memory, kAlignment);
}

void set_exact_arithmetic() {
  std::fesetround(FE_TONEAREST);
#ifdef __x86_64__
  constexpr unsigned kFlushToZero = 1u << 15;
  constexpr unsigned kDenormalsAreZero = 1u << 6;
  _mm_setcsr(_mm_getcsr() & ~(kFlushToZero | kDenormalsAreZero));
#endif
}

}  // namespace uniep::cpu
