// Symmetric memory on GPUs: local (all GPUs of this process, or virtual ranks on one) and a process a GPU.
// Peer stores with flags under load, arrive and done, and recovery after a time-out. Exit status 77 without a GPU.
// Usage: gpu_comm_tests [--ranks N] [--processes]
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator_id.h"
#include "engine/cuda/memory/signals.h"
#include "tests/cuda/comm_arguments.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/nccl_communicator.h"

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
    memory.barrier();  // everybody's signals are clear
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
  memory.barrier();
  exchange.signals().clear();
  memory.barrier();
  results.record(label + " exchange after recovery", exchange.run(50, -1, kLong) == 0);
  exchange.signals().check();
}

constexpr int64_t kBytes = 16 << 20;
constexpr double kSeconds = 60;
constexpr int kIds = 2;  // a unique id of ours and, where there is NCCL, one of its

using Pipes = std::vector<std::array<int, 2>>;

bool has_nccl() {
  try {
    nccl_caller();
    return true;
  } catch (const Error&) {
    return false;
  }
}

// What rank 0 makes the others get, through a pipe a rank.
std::vector<std::string> exchange_ids(int rank, const Pipes& pipes) {
  std::vector<std::string> ids;
  for (int i = 0; i < kIds; ++i) {
    std::string id(kUniqueIdBytes, '\0');
    if (rank == 0) {
      NcclCaller::UniqueId of_nccl{};
      if (i == 1 && has_nccl()) check_nccl(nccl_caller().get_unique_id(&of_nccl), "ncclGetUniqueId");
      id = i == 0 ? new_unique_id() : std::string(of_nccl.bytes, sizeof(of_nccl.bytes));
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

std::shared_ptr<RankMesh> meet(int rank, int ranks, const std::string& name) {
  return std::make_shared<RankMesh>(MeshBootstrap{rank, ranks, name}, kSeconds, kSeconds);
}

void check_in(Results& results, const std::shared_ptr<RankMesh>& mesh, const std::string& name,
              const std::string& folder) {
  const auto memory = make_process_memory(mesh, kBytes, mesh->rank(), true);
  run_checks(results, *memory, "processes, " + name, folder);
}

// All three ways into a group, and memory that is registered.
void run_process(Results& results, int rank, const Pipes& pipes, const std::string& folder) {
  const int ranks = static_cast<int>(pipes.size());
  const std::vector<std::string> ids = exchange_ids(rank, pipes);
  {
    const auto mesh = meet(rank, ranks, name_of_unique_id(ids[0]));
    check_in(results, mesh, "unique id", folder);
    const auto memory = make_process_memory(mesh, 2 * kBytes, rank);
    void* const half = static_cast<std::byte*>(memory->address(rank, rank)) + kBytes;
    const auto registered = share_memory(mesh, half, kBytes, rank);
    run_checks(results, *registered, "processes, registered memory", folder);
    const ScopedDevice scope(rank);
    const Buffer plain(kBytes);
    std::string message = "no error";
    try {
      share_memory(mesh, plain.as<void>(), kBytes, rank);
    } catch (const Error& error) {
      message = error.status() == Status::kInvalidArgument ? error.what() : "another error";
    }
    results.record("processes, plain memory is refused", message.find("can not be shared") != std::string::npos,
                   message);
  }
  if (has_nccl()) {
    NcclCaller::UniqueId id{};
    std::memcpy(id.bytes, ids[1].data(), sizeof(id.bytes));
    Nccl::Communicator communicator = nullptr;
    const ScopedDevice scope(rank);
    check_nccl(nccl_caller().init_rank(&communicator, ranks, id, rank), "ncclCommInitRank");
    int own = -1, all = -1;
    const std::string shared = share_unique_id_over(communicator, rank, own, all, kSeconds);
    results.record("processes, the communicator's rank", own == rank && all == ranks);
    check_in(results, meet(own, all, name_of_unique_id(shared)), "given communicator", folder);
    check_nccl(nccl_caller().destroy(communicator), "ncclCommDestroy: the caller's communicator lives on");
  }
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 0);
  setenv("MASTER_PORT", "29554", 0);
  const RankEnvironment environment = required_rank_environment();
  check_in(results, meet(environment.rank, environment.ranks, environment.name), "torchrun's environment", folder);
}

// A process a GPU; returns the worst exit status.
int run_processes(int ranks, const std::string& folder) {
  Pipes pipes(static_cast<size_t>(ranks));
  for (auto& ends : pipes) {
    if (pipe(ends.data()) != 0) throw std::runtime_error("no pipe to a rank");
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    int status = 1;
    try {
      Results results;
      results.verbose = rank == 0;
      run_process(results, rank, pipes, folder);
      status = results.failed == 0 ? 0 : 1;
    } catch (const std::exception& error) {
      std::printf("FAIL processes, rank %d: %s\n", rank, error.what());
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
  std::printf("comm tests (processes, %d ranks): %s\n", ranks, worst == 0 ? "passed" : "failed");
  return worst;
}

int run(int argc, char** argv, const std::string& folder) {
  int ranks = 4;
  bool processes = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) ranks = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--processes") == 0) processes = true;
  }
  if (processes) return run_processes(ranks, folder);
  Results results;
  results.verbose = true;
  const int devices = device_count();
  std::vector<int> virtual_ranks(static_cast<size_t>(ranks), 0);
  const auto on_one = make_local_symmetric_memory(virtual_ranks, 16 << 20);
  run_checks(results, *on_one, "local, one GPU", folder);
  if (devices > 1) {
    std::vector<int> one_each;
    for (int device = 0; device < devices && device < kMaxTestRanks; ++device) one_each.push_back(device);
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
  const bool forks =
      std::any_of(argv + 1, argv + argc, [](const char* word) { return std::strcmp(word, "--processes") == 0; });
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
