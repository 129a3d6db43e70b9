#pragma once

#include "engine/cuda/device/ptx/common.h"

// stmatrix and ldmatrix: 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
namespace uniep::cuda::ptx {

UNIEP_DEVICE void store_matrix_x4(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

UNIEP_DEVICE void load_matrix_x4(uint32_t address, uint32_t& m0, uint32_t& m1, uint32_t& m2, uint32_t& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(address)
               : "memory");
}

}  // namespace uniep::cuda::ptx
