// The table of faults for kernels (kernel_mutants.h), without a GPU. Usage: kernel_mutants_test [--compile COUNT]
//     [--first N]
// Each fault's text is in its source once, and its layer is legal. With --compile so many of them, from the N-th on,
// compile, and have other machine code than the kernels as they are (the same, where they are said to be equivalent)
// and another key in the cache. Exit status 77 without NVRTC.
#include "tests/cuda/kernel_mutants.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "engine/cuda/kernels/exchange.h"
#include "engine/cuda/runtime/kernel_cache.h"
#include "tests/cuda/disturbed_calls.h"
#include "tests/cuda/machine_code.h"
#include "tests/cuda/mutant_layers.h"
#include "uniep/error.h"

namespace uniep::cuda::test {
namespace {

int failures = 0;

void expect(bool good, const std::string& what) {
  if (!good) std::printf("FAIL %s\n", what.c_str());
  failures += good ? 0 : 1;
}

void check_table() {
  constexpr std::size_t kFewest = 60;
  std::set<std::string> names;
  const std::vector<std::string>& layers = mutant_layer_names();
  for (const KernelMutant& mutant : kernel_mutants()) {
    expect(names.insert(mutant.name).second, mutant.name + ": there are two of that name");
    expect(mutant.text != mutant.replacement, mutant.name + " changes nothing");
    expect(!mutant.breaks.empty(), mutant.name + " does not say what it breaks");
    expect(std::find(layers.begin(), layers.end(), mutant.layer) != layers.end(), mutant.name + ": no such layer");
    const SourceEdit edit = variant_of(mutant).edits.front();
    const int found = occurrences(edit.source, edit.text);
    expect(found == 1, mutant.name + ": its text is " + std::to_string(found) + " times in " + edit.source);
  }
  expect(names.size() >= kFewest, "only " + std::to_string(names.size()) + " faults");
  std::printf("%zu faults\n", names.size());
}

void check_layers() {
  for (const std::string& name : mutant_layer_names()) {
    const MutantLayer layer = mutant_layer(name);
    expect(!kernels_of(layer).empty(), name + " has no kernels");
    const cli::LayerData batch = mutant_batch(layer, 1);
    expect(batch.ids != mutant_batch(layer, 2).ids, name + ": two batches have one routing");
  }
}

// A text that is there twice, or not at all, is no fault.
void check_refusals() {
  for (const char* const text : {"ptx::", "nobody writes this"}) {
    bool refused = false;
    try {
      set_kernel_variant({"none", {}, {{"engine/cuda/device/signals/waiting.h", text, ""}}, {}});
    } catch (const uniep::Error&) {
      refused = true;
    }
    expect(refused, std::string("an edit of '") + text + "' is refused");
  }
}

std::vector<KernelRequest> requests_of(const KernelMutant& mutant) {
  if (mutant.source == "kernels/begin_call.cu") return {begin_call_request()};
  const MutantLayer layer = mutant_layer(mutant.layer);
  std::vector<KernelRequest> requests = kernels_of(layer);
  std::reverse(requests.begin(), requests.end());  // backward's first: faults of its layers are there
  return requests;
}

const std::string& code_as_it_is(const KernelRequest& request, const KernelVariant& with_its_options) {
  static std::map<std::string, std::string> codes;
  std::string& code = codes[request.description()];
  if (!code.empty()) return code;
  KernelVariant plain = with_its_options;
  plain.edits.clear();
  set_kernel_variant(plain);
  return code = machine_code(compile_kernel(request).cubin);
}

// Whether one of the layer's kernels has other machine code.
void check_compiles(const KernelMutant& mutant) {
  const KernelVariant variant = variant_of(mutant);
  bool differs = false;
  for (const KernelRequest& request : requests_of(mutant)) {
    set_kernel_variant({});
    const std::string key = cache_key(request);
    const std::string& plain = code_as_it_is(request, variant);
    set_kernel_variant(variant);
    expect(cache_key(request) != key, mutant.name + " has the key of the kernel as it is");
    differs = machine_code(compile_kernel(request).cubin) != plain;
    if (differs) break;
  }
  const bool good = differs != mutant.is_equivalent();
  std::printf("%-4s %s\n", good ? "ok" : "FAIL", mutant.name.c_str());
  std::fflush(stdout);
  expect(good, mutant.name + (differs ? " is said to be equivalent, but has other machine code"
                                      : " has the machine code of the kernels as they are"));
}

// Delays are in kernels only where they are asked for.
void check_disturbance() {
  const MutantLayer layer = mutant_layer("epilogue");
  const KernelRequest request = kernels_of(layer.how, layer.config).front();
  set_kernel_variant({});
  const std::string key = cache_key(request);
  set_kernel_variant(disturbed_kernels());
  expect(cache_key(request) != key, "kernels with delays have the key of those without");
  const CompiledKernel disturbed = compile_kernel(request);
  expect(disturbed.use.advisories.empty(), "kernels with delays have advisories");
  std::printf("with delays: %d registers, %d bytes spilled\n", disturbed.use.registers, disturbed.use.spill_bytes);
}

int run(int argc, char** argv) {
  int first = 0, count = 0;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--first") == 0) first = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--compile") == 0) count = std::atoi(argv[i + 1]);
  }
  check_table();
  check_layers();
  check_refusals();
  if (count > 0) {
    try {
      std::printf("NVRTC %s\n", compiler_version().c_str());
    } catch (const uniep::Error& error) {
      std::printf("skipped: %s\n", error.what());
      return failures == 0 ? 77 : 1;
    }
    check_disturbance();
  }
  const std::vector<KernelMutant>& all = kernel_mutants();
  for (int i = first; i < first + count && i < static_cast<int>(all.size()); ++i) {
    check_compiles(all[static_cast<std::size_t>(i)]);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  try {
    return uniep::cuda::test::run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
