// Symmetric memory on GPUs: local (all GPUs of this process, or virtual ranks on one) and nccl (a process a GPU).
// Peer stores with flags under load, arrive and done, and recovery after a time-out. Exit status 77 without a GPU.
// Usage: gpu_comm_tests [--ranks N] [--nccl]
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/nccl_library.h"
#include "comm/signals.h"
#include "tests/cuda/comm_arguments.h"
#include "tests/cuda/gpu_support.h"

namespace uniep::cuda::test {
namespace {

constexpr int kCtas = 8;
constexpr int kThreads = 256;
constexpr int kWords = 64 * 1024;
constexpr int kLoadWords = 1 << 20;

class Exchange {
 public:
  Exchange(SymmetricMemory& memory, const std::string& folder)
      : memory_(memory), signals_(memory, sizeof(ExchangeFlags)) {
    for (const int rank : memory.own_ranks()) {
      const ScopedDevice scope(memory.device(rank));
      counters_.emplace_back(8);
      load_.emplace_back(static_cast<int64_t>(kLoadWords) * 4);
      errors_.emplace_back(8);
      errors_.back().set_bytes(0);
      kernels_.push_back(std::make_unique<Kernels>(memory.device(rank), folder));
    }
  }

  Signals& signals() { return signals_; }

  // Returns how many words were wrong.
  unsigned long long run(int iterations, int silent_rank, uint64_t limit_nanoseconds) {
    const std::vector<int>& own = memory_.own_ranks();
    ExchangeArguments args{};
    args.limit_nanoseconds = limit_nanoseconds;
    args.ranks = memory_.ranks();
    args.ctas = kCtas;
    args.iterations = iterations;
    args.words = kWords;
    args.load_words = kLoadWords;
    args.silent_rank = silent_rank;
    for (size_t i = 0; i < own.size(); ++i) {
      const ScopedDevice scope(memory_.device(own[i]));
      counters_[i].set_bytes(0);
      check(driver().cuCtxSynchronize(), "clearing counters");
      for (int peer = 0; peer < memory_.ranks(); ++peer) {
        args.memory[own[i]][peer] = static_cast<uint8_t*>(memory_.address(own[i], peer));
      }
      args.epoch[own[i]] = signals_.epoch(own[i]);
      args.report[own[i]] = signals_.report(own[i]);
      args.counters[own[i]] = counters_[i].as<uint32_t>();
      args.load[own[i]] = load_[i].as<uint32_t>();
    }
    // Consecutive ranks of one device go as one cooperative launch whose CTAs are divided among them.
    for (size_t i = 0; i < own.size();) {
      size_t end = i + 1;
      while (end < own.size() && memory_.device(own[end]) == memory_.device(own[i])) ++end;
      const ScopedDevice scope(memory_.device(own[i]));
      args.first_rank = own[i];
      args.errors = errors_[i].as<unsigned long long>();
      Launch launch{.grid_x = static_cast<int>(end - i) * kCtas, .threads = kThreads, .cooperative = true};
      kernels_[i]->run("comm_kernels.cu", "test_exchange", launch, args);
      i = end;
    }
    unsigned long long wrong = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      const ScopedDevice scope(memory_.device(own[i]));
      wrong += errors_[i].download<unsigned long long>(1)[0];
    }
    return wrong;
  }

 private:
  SymmetricMemory& memory_;
  Signals signals_;
  std::vector<Buffer> counters_;
  std::vector<Buffer> load_;
  std::vector<Buffer> errors_;
  std::vector<std::unique_ptr<Kernels>> kernels_;
};

void run_checks(Results& results, SymmetricMemory& memory, const std::string& name, const std::string& folder) {
  constexpr uint64_t kLong = 20'000'000'000;
  constexpr uint64_t kShort = 200'000'000;
  Exchange exchange(memory, folder);
  const std::string label = name + " ranks=" + std::to_string(memory.ranks());
  // Warm-up by one iteration, so that modules are loaded on every device before kernels wait for each other.
  results.record(label + " first exchange", exchange.run(1, -1, kLong) == 0);
  results.record(label + " exchanges under load", exchange.run(200, -1, kLong) == 0);
  exchange.signals().check();
  memory.barrier();
  const int silent = memory.ranks() - 1;
  exchange.run(3, silent, kShort);
  std::string message = "no error";
  try {
    exchange.signals().check();
  } catch (const Error& error) {
    message = error.status() == Status::kTimeout ? error.what() : "another error";
  }
  const bool names_rank = message.find("for rank " + std::to_string(silent) + " to arrive") != std::string::npos;
  results.record(label + " time-out names the silent rank", names_rank, message);
  exchange.signals().recover();
  results.record(label + " exchange after recovery", exchange.run(50, -1, kLong) == 0);
  exchange.signals().check();
}

constexpr int64_t kNcclBytes = 16 << 20;
constexpr int kIds = 2;  // unique ids that rank 0 hands to the others

// What rank 0 makes the others get, through a pipe a rank.
std::vector<std::string> exchange_ids(int rank, const std::vector<std::array<int, 2>>& pipes) {
  std::vector<std::string> ids;
  for (int i = 0; i < kIds; ++i) {
    std::string id(128, '\0');
    if (rank == 0) {
      id = make_nccl_unique_id();
      for (size_t peer = 1; peer < pipes.size(); ++peer) {
        if (write(pipes[peer][1], id.data(), id.size()) != static_cast<ssize_t>(id.size())) {
          throw std::runtime_error("a pipe does not take a unique id");
        }
      }
    } else if (read(pipes[static_cast<size_t>(rank)][0], id.data(), id.size()) != static_cast<ssize_t>(id.size())) {
      throw std::runtime_error("no unique id from rank 0");
    }
    ids.push_back(id);
  }
  return ids;
}

// All three ways into a group; torchrun's last, since it leaves NCCL_COMM_ID set.
void run_nccl_rank(Results& results, int rank, const std::vector<std::array<int, 2>>& pipes,
                   const std::string& folder) {
  const int ranks = static_cast<int>(pipes.size());
  const std::vector<std::string> ids = exchange_ids(rank, pipes);
  {
    NcclBootstrap bootstrap{.rank = rank, .ranks = ranks, .device = rank, .unique_id = ids[0]};
    const auto memory = make_nccl_symmetric_memory(bootstrap, kNcclBytes);
    run_checks(results, *memory, "nccl, unique id", folder);
  }
  {
    Nccl::UniqueId id{};
    std::memcpy(id.bytes, ids[1].data(), sizeof(id.bytes));
    Nccl::Communicator communicator = nullptr;
    const ScopedDevice scope(rank);
    check_nccl(nccl().init_rank(&communicator, ranks, id, rank), "ncclCommInitRank");
    {
      NcclBootstrap bootstrap;
      bootstrap.device = rank;
      bootstrap.communicator = communicator;
      const auto memory = make_nccl_symmetric_memory(bootstrap, kNcclBytes);
      run_checks(results, *memory, "nccl, given communicator", folder);
    }
    check_nccl(nccl().destroy(communicator), "ncclCommDestroy: the caller's communicator lives on");
  }
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 0);
  setenv("MASTER_PORT", "29554", 0);
  const auto memory = make_nccl_symmetric_memory(nccl_bootstrap_from_environment(), kNcclBytes);
  run_checks(results, *memory, "nccl, torchrun's environment", folder);
}

// A process a GPU; returns the worst exit status.
int run_nccl(int ranks, const std::string& folder) {
  std::vector<std::array<int, 2>> pipes(static_cast<size_t>(ranks));
  for (auto& ends : pipes) {
    if (pipe(ends.data()) != 0) throw std::runtime_error("no pipe to a rank");
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    int status = 1;
    try {
      Results results;
      results.verbose = rank == 0;
      run_nccl_rank(results, rank, pipes, folder);
      status = results.failed == 0 ? 0 : 1;
    } catch (const std::exception& error) {
      std::printf("FAIL nccl rank %d: %s\n", rank, error.what());
    }
    std::fflush(stdout);
    _exit(status);
  }
  int worst = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    wait(&status);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) worst = 1;
  }
  std::printf("comm tests (nccl, %d ranks): %s\n", ranks, worst == 0 ? "passed" : "failed");
  return worst;
}

int run(int argc, char** argv, const std::string& folder) {
  int ranks = 4;
  bool use_nccl = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) ranks = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--nccl") == 0) use_nccl = true;
  }
  if (use_nccl) return run_nccl(ranks, folder);
  Results results;
  results.verbose = true;
  const int devices = device_count();
  std::vector<int> virtual_ranks(static_cast<size_t>(ranks), 0);
  const auto on_one = make_local_symmetric_memory(virtual_ranks, 16 << 20);
  run_checks(results, *on_one, "local, one GPU", folder);
  if (devices > 1) {
    std::vector<int> one_each;
    for (int device = 0; device < devices && device < kMostTestRanks; ++device) one_each.push_back(device);
    const auto memory = make_local_symmetric_memory(one_each, 16 << 20);
    run_checks(results, *memory, "local, a GPU each", folder);
  }
  std::printf("comm tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  const std::string path = __FILE__;
  const char* const given = std::getenv("UNIEP_TEST_KERNELS");
  const std::string folder = given != nullptr ? given : path.substr(0, path.rfind('/'));
  // Not before a fork: a CUDA context does not survive it.
  const bool forks = argc > 1 && std::strcmp(argv[argc - 1], "--nccl") == 0;
  try {
    if (!forks) uniep::cuda::require_hopper(0);
  } catch (const uniep::Error& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  try {
    return uniep::cuda::test::run(argc, argv, folder);
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
