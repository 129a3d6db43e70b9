#pragma once

// What lets one header compile for the host and, through NVRTC or nvcc, for the device.
#ifdef __CUDACC__
#define UNIEP_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined: a translation unit built for one instruction set must not leave a copy that others link to.
#define UNIEP_HOST_DEVICE inline __attribute__((always_inline))
#endif

#ifdef __CUDACC_RTC__
namespace uniep {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
}  // namespace uniep
#else
#include <cstdint>
namespace uniep {
using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
}  // namespace uniep
#endif
