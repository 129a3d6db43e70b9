#pragma once

#include "tests/cuda/kernel_mutants.h"

// The parts of kernel_mutants().
namespace uniep::cuda::test {

std::vector<KernelMutant> signal_mutants();
std::vector<KernelMutant> transfer_mutants();
std::vector<KernelMutant> mainloop_mutants();
std::vector<KernelMutant> epilogue_mutants();

}  // namespace uniep::cuda::test
