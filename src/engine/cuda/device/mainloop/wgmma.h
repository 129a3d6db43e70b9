#pragma once

#include "engine/cuda/device/mainloop/descriptor.h"

// wgmma m64nNk16, bf16 in, fp32 out, for N = 64, 128, 192, 256: start: D (64 x N, in registers) = A B; add: D += A B.
// Thread t of the warpgroup holds, for column group j of 8, D[row, 8 j + 2 (t % 4) + {0, 1}] in d[4 j + {0, 1}] and the
// row 8 below in d[4 j + {2, 3}], where row = 16 (t / 32) + (t % 32) / 4.
namespace uniep::cuda {

UNIEP_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
UNIEP_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

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

#define UNIEP_NAMES_0                                                                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define UNIEP_NAMES_1                                                                                                  \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%" \
  "60,%61,%62,%63"
#define UNIEP_NAMES_2                                                                                                  \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%" \
  "92,%93,%94,%95"
#define UNIEP_NAMES_3                                                                                                 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%" \
  "119,%120,%121,%122,%123,%124,%125,%126,%127"
#define UNIEP_REGISTERS_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define UNIEP_REGISTERS_16(c, i) \
  UNIEP_REGISTERS_4(c, i), UNIEP_REGISTERS_4(c, i + 4), UNIEP_REGISTERS_4(c, i + 8), UNIEP_REGISTERS_4(c, i + 12)
#define UNIEP_REGISTERS_32(c, i) UNIEP_REGISTERS_16(c, i), UNIEP_REGISTERS_16(c, i + 16)
#define UNIEP_REGISTERS_64(c, i) UNIEP_REGISTERS_32(c, i), UNIEP_REGISTERS_32(c, i + 32)

// A, B: the numbers of the operands after the accumulators. kScale: 0 = D is not read, 1 = D is added to.
#define UNIEP_WGMMA(N, NAMES, A, B, S, TA, TB, kScale, ...)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S ", 0;\nwgmma.mma_async.sync.aligned.m64n" N \
               "k16.f32.bf16.bf16 {" NAMES "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n}\n"      \
               : __VA_ARGS__                                                                     \
               : "l"(a), "l"(b), "n"(kScale), "n"(kMajorA == Major::kMN), "n"(kMajorB == Major::kMN))

#define UNIEP_DEFINE_WGMMA(kN, N, NAMES, A, B, S, TA, TB, REGISTERS)             \
  template <Major kMajorA, Major kMajorB>                                        \
  struct Wgmma<kN, kMajorA, kMajorB> {                                           \
    static UNIEP_DEVICE void start(float (&d)[kN / 2], uint64_t a, uint64_t b) { \
      UNIEP_WGMMA(N, NAMES, A, B, S, TA, TB, 0, REGISTERS("=f"));                \
    }                                                                            \
    static UNIEP_DEVICE void add(float (&d)[kN / 2], uint64_t a, uint64_t b) {   \
      UNIEP_WGMMA(N, NAMES, A, B, S, TA, TB, 1, REGISTERS("+f"));                \
    }                                                                            \
  }

template <int kN, Major kMajorA, Major kMajorB>
struct Wgmma;

#define UNIEP_ACCUMULATORS_64(c) UNIEP_REGISTERS_32(c, 0)
#define UNIEP_ACCUMULATORS_128(c) UNIEP_REGISTERS_64(c, 0)
#define UNIEP_ACCUMULATORS_192(c) UNIEP_REGISTERS_64(c, 0), UNIEP_REGISTERS_32(c, 64)
#define UNIEP_ACCUMULATORS_256(c) UNIEP_REGISTERS_64(c, 0), UNIEP_REGISTERS_64(c, 64)

UNIEP_DEFINE_WGMMA(64, "64", UNIEP_NAMES_0, "%32", "%33", "%34", "%35", "%36", UNIEP_ACCUMULATORS_64);
UNIEP_DEFINE_WGMMA(128, "128", UNIEP_NAMES_0 UNIEP_NAMES_1, "%64", "%65", "%66", "%67", "%68", UNIEP_ACCUMULATORS_128);
UNIEP_DEFINE_WGMMA(192, "192", UNIEP_NAMES_0 UNIEP_NAMES_1 UNIEP_NAMES_2, "%96", "%97", "%98", "%99", "%100",
                   UNIEP_ACCUMULATORS_192);
UNIEP_DEFINE_WGMMA(256, "256", UNIEP_NAMES_0 UNIEP_NAMES_1 UNIEP_NAMES_2 UNIEP_NAMES_3, "%128", "%129", "%130", "%131",
                   "%132", UNIEP_ACCUMULATORS_256);

}  // namespace uniep::cuda
