// What the calls of a layer on the cuda engine take of the host, without a GPU: on a stand-in for the CUDA driver whose
// kernels do nothing, so that what the driver itself takes is left out. One rank, Qwen3-30B's sizes on one of two.
//   host_time [--calls N] [--experts E] [--tokens T] [--most US]
// Prints of each call, in microseconds, the median and the quickest tenth, which other work on the machine moves less.
// --most: exit status 1 where that of a call is above. UNIEP_FAKE_CUDA is where the build has the stand-in.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/cuda/runtime/dynamic_library.h"
#include "uniep/uniep.h"

namespace {

constexpr int kWarmUp = 10;  // kernels are loaded, memory grows
constexpr int64_t kHidden = 2048, kIntermediate = 768, kTopk = 8;

// Addresses of so many bytes, which no kernel touches.
template <typename T>
T* addresses(int64_t count) {
  void* const memory = ::mmap(nullptr, static_cast<std::size_t>(count) * sizeof(T), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

struct Call {
  const char* name;
  std::vector<double> microseconds;
};

template <typename Run>
void time(Call& call, Run&& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  call.microseconds.push_back(
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
}

struct Options {
  int64_t calls = 1000, experts = 64, tokens = 8192, most = 0;
};

// Throws std::invalid_argument.
Options read_options(int argc, char** argv) {
  Options options;
  const std::map<std::string, int64_t*> known = {{"--calls", &options.calls},
                                                 {"--experts", &options.experts},
                                                 {"--tokens", &options.tokens},
                                                 {"--most", &options.most}};
  for (int i = 1; i < argc; i += 2) {
    const auto found = known.find(argv[i]);
    if (found == known.end()) {
      throw std::invalid_argument(std::string(argv[i]) + ": legal are --calls, --experts, --tokens and --most");
    }
    char* end = nullptr;
    const char* const text = i + 1 < argc ? argv[i + 1] : "";
    *found->second = std::strtoll(text, &end, 10);
    const bool positive = *found->second > 0 || (found->second == &options.most && *found->second == 0);
    if (*text == 0 || *end != 0 || !positive) {
      throw std::invalid_argument(std::string(argv[i]) + ": '" + text + "'; must be a number above 0");
    }
  }
  return options;
}

bool measure(int64_t calls, int64_t experts, int64_t tokens, int64_t most) {
  const uniep::cuda::DynamicLibrary stand_in("the stand-in", "UNIEP_LIBCUDA", {});
  void (*deal_evenly)(int) = nullptr;
  stand_in.bind(deal_evenly, "fake_cuda_deal_evenly");
  deal_evenly(1);

  uniep::GroupOptions options;
  options.ranks = 1;
  options.engine = uniep::EngineKind::kCuda;
  uniep::Group group(options);
  const uniep::LayerShape shape{.hidden = kHidden, .intermediate = kIntermediate, .experts = experts, .topk = kTopk};
  const uniep::Layer layer(group, shape);

  const uniep::Routing routing{
      .tokens = tokens, .topk_ids = addresses<int32_t>(tokens * kTopk), .probs = addresses<float>(tokens * kTopk)};
  const uniep::Weights weights{.w1 = addresses<uniep::BFloat16>(experts * 2 * kIntermediate * kHidden),
                               .w2 = addresses<uniep::BFloat16>(experts * kHidden * kIntermediate)};
  const uniep::ForwardArguments forward{.x = addresses<uniep::BFloat16>(tokens * kHidden),
                                        .weights = weights,
                                        .y = addresses<uniep::BFloat16>(tokens * kHidden)};
  const uniep::BackwardArguments backward{
      .dy = addresses<uniep::BFloat16>(tokens * kHidden),
      .weights = weights,
      .dx = addresses<uniep::BFloat16>(tokens * kHidden),
      .dprobs = addresses<float>(tokens * kTopk),
      .gradients = {.dw1 = addresses<uniep::BFloat16>(experts * 2 * kIntermediate * kHidden),
                    .dw2 = addresses<uniep::BFloat16>(experts * kHidden * kIntermediate)}};

  Call by_need{"place by need", {}}, capacity{"place in a capacity", {}}, forwards{"forward", {}},
      backwards{"backward", {}};
  const uniep::Layer bounded(group, shape,
                             {.capacity = {.rows = 2 * tokens * kTopk + 128 * experts, .tokens = tokens}});
  for (int64_t i = 0; i < calls + kWarmUp; ++i) {
    uniep::Placement placement;
    uniep::Saved saved;
    time(capacity, [&] { placement = bounded.place(routing); });
    time(by_need, [&] { placement = layer.place(routing); });
    time(forwards, [&] { saved = layer.forward(placement, forward); });
    time(backwards, [&] { layer.backward(saved, backward); });
  }
  bool quick = true;
  std::printf("%-20s %8s %15s\n", "us", "median", "quickest tenth");
  for (Call* call : {&by_need, &capacity, &forwards, &backwards}) {
    std::vector<double>& times = call->microseconds;
    times.erase(times.begin(), times.begin() + kWarmUp);
    std::sort(times.begin(), times.end());
    const double tenth = times[times.size() / 10];
    std::printf("%-20s %8.1f %15.1f\n", call->name, times[times.size() / 2], tenth);
    quick = quick && (most == 0 || tenth <= static_cast<double>(most));
  }
  return quick;
}

}  // namespace

int main(int argc, char** argv) {
  ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
  ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
  try {
    const Options given = read_options(argc, argv);
    return measure(given.calls, given.experts, given.tokens, given.most) ? 0 : 1;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "host_time: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "host_time: %s\n", error.what());
    return 1;
  }
}
