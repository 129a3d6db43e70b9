#include "tests/cuda/kernel_mutants.h"

#include <algorithm>

#include "tests/cuda/disturbed_calls.h"
#include "tests/cuda/kernel_mutant_tables.h"
#include "tests/cuda/mutant_layers.h"
#include "uniep/error.h"

namespace uniep::cuda::test {
namespace {

const std::string kDevice = "engine/cuda/device/";

std::string path_of(const KernelMutant& mutant) {
  return mutant.source.starts_with("program/") ? mutant.source : kDevice + mutant.source;
}

std::vector<KernelMutant> all_mutants() {
  std::vector<KernelMutant> all;
  for (const auto& part : {signal_mutants(), transfer_mutants(), mainloop_mutants(), epilogue_mutants()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace

const std::vector<KernelMutant>& kernel_mutants() {
  static const std::vector<KernelMutant> mutants = all_mutants();
  return mutants;
}

const KernelMutant& find_mutant(const std::string& name) {
  const std::vector<KernelMutant>& all = kernel_mutants();
  const auto found = std::find_if(all.begin(), all.end(), [&](const KernelMutant& m) { return m.name == name; });
  if (found == all.end()) throw Error(Status::kInvalidArgument, "no mutant is named '" + name + "'");
  return *found;
}

KernelVariant variant_of(const KernelMutant& mutant) {
  KernelVariant variant = disturbed_kernels();
  variant.name = mutant.name;
  variant.edits = {{path_of(mutant), mutant.text, mutant.replacement}};
  // Kernels beside the megakernel are mutated in their own file.
  const bool in_exchange = mutant_layer(mutant.layer).dispatch_alone;
  const char* const user = in_exchange ? "kernels/exchange.cu" : "kernels/megakernel.cu";
  variant.kernels = {mutant.source.ends_with(".cu") ? path_of(mutant) : kDevice + user};
  return variant;
}

}  // namespace uniep::cuda::test
