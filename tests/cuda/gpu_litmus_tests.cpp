// The idioms by which the layer's kernels hand data from one warp to another (litmus_arguments.h), alone, for many
// rounds beside traffic: inside one GPU, and between two where there are two. Usage: gpu_litmus_tests [--rounds N]
//     [--idiom N] [--pairs N] [--no-traffic] [--weak] [--compile]
// --rounds (default 1e7): of each idiom, all pairs of warps together. --weak runs each idiom without one of its fences
// or waits, too, and prints how many words were wrong: none says that these GPUs do not need it here, not that the
// memory model does not. --compile puts the kernels into the cache, needs no GPU, and ends. Exit status 1 where a word
// of an idiom as it is was wrong; 77 without a Hopper GPU.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "comm/symmetric_memory.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/litmus_arguments.h"
#include "tests/cuda/rank_processes.h"

namespace uniep::cuda::test {
namespace {

struct Options {
  double rounds = 1e7;
  int idiom = -1;  // all
  int pairs = 96;
  bool traffic = true;
  bool weak = false;
  bool compile = false;
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--rounds") options.rounds = std::atof(value().c_str());
    if (name == "--idiom") options.idiom = std::atoi(value().c_str());
    if (name == "--pairs") options.pairs = std::max(1, std::atoi(value().c_str()));
    if (name == "--no-traffic") options.traffic = false;
    if (name == "--weak") options.weak = true;
    if (name == "--compile") options.compile = true;
  }
  return options;
}

constexpr const char* kFile = "litmus_kernels.cu";

// What each is without.
struct Weakness {
  Idiom idiom;
  int weak;
  const char* without;
};
constexpr Weakness kWeaknesses[] = {
    {Idiom::kBulkStore, 1, "the wait until bulk stores are complete"},
    {Idiom::kBulkStore, 2, "the flag's release"},
    {Idiom::kStore, 1, "the fence before bulk loads"},
    {Idiom::kStore, 2, "the flag's release"},
    {Idiom::kStore, 3, "the flag's acquire"},
    {Idiom::kStoreLoad, 2, "the flag's release"},
    {Idiom::kStoreLoad, 3, "the flag's acquire"},
    {Idiom::kPull, 1, "the fence before bulk loads"},
    {Idiom::kPull, 2, "the flag's release"},
    {Idiom::kPull, 3, "the flag's acquire"},
    {Idiom::kRing, 1, "the wait until a stage has left"},
    {Idiom::kCluster, 1, "the wait for a record"},
};
constexpr int kIdioms = static_cast<int>(Idiom::kCluster) + 1;
constexpr const char* kNames[kIdioms] = {"bulk store, flag, bulk load", "store, flag, bulk load",
                                         "store, flag, load",           "store, flag, bulk load from afar",
                                         "ring of two stages",          "records in a cluster"};

// Two ranks, on one GPU or two.
class Litmus {
 public:
  Litmus(const Options& options, std::vector<int> devices)
      : options_(options),
        devices_(std::move(devices)),
        pair_bytes_(options.pairs * static_cast<int64_t>(sizeof(LitmusPair))),
        memory_(make_local_symmetric_memory(devices_, pair_bytes_ + kLoadBytes)) {
    const std::size_t gpus = on_one_gpu() ? 1 : devices_.size();
    for (std::size_t i = 0; i < gpus; ++i) {
      const ScopedDevice scope(devices_[i]);
      kernels_.push_back(std::make_unique<Kernels>(devices_[i], kernel_folder()));
      counts_.emplace_back(16);
    }
  }

  bool on_one_gpu() const { return devices_[0] == devices_[1]; }

  struct Outcome {
    double rounds = 0;
    unsigned long long wrong = 0;
    bool stopped = false;
    double seconds = 0;
  };

  // All pairs together so many rounds, rank 0 and rank 1 producing in turn.
  Outcome run(Idiom idiom, int weak, double rounds) {
    clear();
    Outcome outcome;
    const double begin = seconds_now();
    for (int turn = 0; outcome.rounds < rounds && !outcome.stopped; ++turn) {
      LitmusArguments args = arguments(idiom, weak);
      args.producer = turn % 2;
      // Flags and acknowledgements lie where they lay: the other direction begins anew.
      if (turn > 0) clear();
      args.first_round = 1;
      args.rounds = kRoundsOfLaunch;
      launch(args);
      outcome.rounds += static_cast<double>(args.rounds) * options_.pairs;
      gather(outcome);
    }
    outcome.seconds = seconds_now() - begin;
    return outcome;
  }

 private:
  static constexpr int64_t kLoadBytes = 64 << 20;
  static constexpr uint32_t kRoundsOfLaunch = 20'000;
  static constexpr int kTrafficCtas = 128;

  struct Counts {
    unsigned long long wrong;
    uint32_t finished, stopped;
  };

  LitmusArguments arguments(Idiom idiom, int weak) const {
    LitmusArguments args{};
    for (int rank = 0; rank < 2; ++rank) {
      for (int peer = 0; peer < 2; ++peer) {
        auto* const bytes = static_cast<uint8_t*>(memory_->address(rank, peer));
        args.memory[rank][peer] = reinterpret_cast<LitmusPair*>(bytes);
        args.load[rank][peer] = reinterpret_cast<uint32_t*>(bytes + pair_bytes_);
      }
    }
    args.load_words = kLoadBytes / 8;  // half is read, half written
    args.limit_nanoseconds = 5'000'000'000;
    args.idiom = idiom;
    args.weak = weak;
    args.pairs = options_.pairs;
    return args;
  }

  void launch(LitmusArguments args) {
    const bool in_cluster = args.idiom == Idiom::kCluster;
    for (std::size_t i = 0; i < kernels_.size(); ++i) {
      const ScopedDevice scope(devices_[i]);
      auto* const counts = counts_[i].as<Counts>();
      args.wrong = &counts->wrong;
      args.finished = &counts->finished;
      args.stopped = &counts->stopped;
      args.first_rank = static_cast<int32_t>(i);
      args.ranks = on_one_gpu() ? 2 : 1;
      if (in_cluster) {
        kernels_[i]->run(kFile, "litmus_cluster", {.grid_x = 2 * args.pairs, .threads = 64, .cluster = 2}, args);
        continue;
      }
      const int working = args.pairs * args.ranks;
      kernels_[i]->run(kFile, "litmus_pairs",
                       {.grid_x = working + (options_.traffic ? kTrafficCtas : 0), .threads = 32, .cooperative = true},
                       args);
    }
  }

  void clear() {
    for (int rank = 0; rank < 2; ++rank) {
      const ScopedDevice scope(devices_[static_cast<std::size_t>(rank)]);
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory_->address(rank, rank)), 0,
                                     static_cast<std::size_t>(pair_bytes_), nullptr),
            "clearing flags");
    }
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      const ScopedDevice scope(devices_[i]);
      counts_[i].set_bytes(0);
    }
    for (const int device : devices_) {
      const ScopedDevice scope(device);
      check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
    }
  }

  void gather(Outcome& outcome) {
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      const ScopedDevice scope(devices_[i]);
      const Counts counts = counts_[i].download<Counts>(1)[0];
      outcome.wrong += counts.wrong;
      outcome.stopped |= counts.stopped != 0;
    }
  }

  const Options& options_;
  std::vector<int> devices_;
  int64_t pair_bytes_;
  std::unique_ptr<SymmetricMemory> memory_;
  std::vector<std::unique_ptr<Kernels>> kernels_;
  std::vector<Buffer> counts_;
};

void print(const char* where, int idiom, const Litmus::Outcome& outcome, const std::string& word) {
  std::printf("%-4s %-9s %-34s %.1e rounds %12llu words wrong %6.1f s%s\n", word.c_str(), where, kNames[idiom],
              outcome.rounds, outcome.wrong, outcome.seconds, outcome.stopped ? "  a wait ran out" : "");
  std::fflush(stdout);
}

int run_idioms(Litmus& litmus, const char* where, const Options& options) {
  int failures = 0;
  const auto wanted = [&](Idiom idiom) {
    if (idiom == Idiom::kCluster && !litmus.on_one_gpu()) return false;
    return options.idiom < 0 || options.idiom == static_cast<int>(idiom);
  };
  for (int i = 0; i < kIdioms; ++i) {
    const auto idiom = static_cast<Idiom>(i);
    if (!wanted(idiom)) continue;
    litmus.run(idiom, 0, 1);  // loads the kernel on every GPU
    const Litmus::Outcome outcome = litmus.run(idiom, 0, options.rounds);
    const bool good = outcome.wrong == 0 && !outcome.stopped;
    failures += good ? 0 : 1;
    print(where, i, outcome, good ? "ok" : "FAIL");
  }
  for (const Weakness& weakness : kWeaknesses) {
    if (!options.weak || !wanted(weakness.idiom)) continue;
    const Litmus::Outcome outcome = litmus.run(weakness.idiom, weakness.weak, options.rounds);
    print(where, static_cast<int>(weakness.idiom), outcome, "weak");
    std::printf("     without %s\n", weakness.without);
  }
  return failures;
}

int run(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  int failures = 0;
  {
    Litmus one(options, {0, 0});
    failures += run_idioms(one, "one GPU", options);
  }
  if (device_count() > 1) {
    Litmus two(options, {0, 1});
    failures += run_idioms(two, "two GPUs", options);
  }
  std::printf("litmus tests: %d failed\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  using namespace uniep::cuda;
  using namespace uniep::cuda::test;
  if (!read_options(argc, argv).compile) return run_on_hopper(run, argc, argv);
  try {
    compile_kernels({Kernels::request(kernel_folder(), kFile, "litmus_pairs")}, 1);
    return 0;
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
