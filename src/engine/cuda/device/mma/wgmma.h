#pragma once

#include "engine/cuda/device/mma/descriptor.h"

// wgmma m64nNk16, bf16 in, fp32 out, for N = 64, 128, 256: D (64 x N, in registers) += A B, or D = A B when `accumulate`
// is false. Thread t of the warpgroup holds, for column group j of 8, D[row, 8 j + 2 (t % 4) + {0, 1}] in
// d[4 j + {0, 1}] and the row 8 below in d[4 j + {2, 3}], where row = 16 (t / 32) + (t % 32) / 4.
namespace uniep::cuda {

UNIEP_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
UNIEP_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kGroupsLeft>
UNIEP_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroupsLeft) : "memory");
}

// Keeps the compiler from moving reads or writes of the accumulators across this point.
template <int kCount>
UNIEP_DEVICE void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define UNIEP_NAMES_0 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define UNIEP_NAMES_1 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define UNIEP_NAMES_2 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define UNIEP_NAMES_3 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define UNIEP_REGISTERS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define UNIEP_REGISTERS_16(i) \
  UNIEP_REGISTERS_4(i), UNIEP_REGISTERS_4(i + 4), UNIEP_REGISTERS_4(i + 8), UNIEP_REGISTERS_4(i + 12)
#define UNIEP_REGISTERS_64(i) \
  UNIEP_REGISTERS_16(i), UNIEP_REGISTERS_16(i + 16), UNIEP_REGISTERS_16(i + 32), UNIEP_REGISTERS_16(i + 48)

// A is the number of the first operand after the accumulators.
#define UNIEP_WGMMA(N, NAMES, A, B, S, TA, TB, ...)                                                          \
  asm volatile(                                                                                              \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " S ", 0;\nwgmma.mma_async.sync.aligned.m64n" N                       \
      "k16.f32.bf16.bf16 {" NAMES "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n}\n"                            \
      : __VA_ARGS__                                                                                          \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA), "n"(kTransposeB))

template <int kN, Major kMajorA, Major kMajorB>
struct Wgmma;

template <Major kMajorA, Major kMajorB>
struct Wgmma<64, kMajorA, kMajorB> {
  static constexpr int kTransposeA = kMajorA == Major::kMN;
  static constexpr int kTransposeB = kMajorB == Major::kMN;
  static UNIEP_DEVICE void issue(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
    UNIEP_WGMMA("64", UNIEP_NAMES_0, "%32", "%33", "%34", "%35", "%36", UNIEP_REGISTERS_16(0), UNIEP_REGISTERS_16(16));
  }
};

template <Major kMajorA, Major kMajorB>
struct Wgmma<128, kMajorA, kMajorB> {
  static constexpr int kTransposeA = kMajorA == Major::kMN;
  static constexpr int kTransposeB = kMajorB == Major::kMN;
  static UNIEP_DEVICE void issue(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
    UNIEP_WGMMA("128", UNIEP_NAMES_0 UNIEP_NAMES_1, "%64", "%65", "%66", "%67", "%68", UNIEP_REGISTERS_64(0));
  }
};

template <Major kMajorA, Major kMajorB>
struct Wgmma<256, kMajorA, kMajorB> {
  static constexpr int kTransposeA = kMajorA == Major::kMN;
  static constexpr int kTransposeB = kMajorB == Major::kMN;
  static UNIEP_DEVICE void issue(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
    UNIEP_WGMMA("256", UNIEP_NAMES_0 UNIEP_NAMES_1 UNIEP_NAMES_2 UNIEP_NAMES_3, "%128", "%129", "%130", "%131", "%132",
                UNIEP_REGISTERS_64(0), UNIEP_REGISTERS_64(64));
  }
};

}  // namespace uniep::cuda
