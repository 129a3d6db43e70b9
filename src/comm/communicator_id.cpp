#include "comm/communicator_id.h"

#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <system_error>
#include <thread>

#include "comm/bootstrap.h"
#include "comm/device_wait.h"
#include "comm/nccl_library.h"
#include "engine/cuda/runtime/driver.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using cuda::check;
using cuda::driver;

// As 32-bit numbers, of which all ranks but the first have zeros: their sum is the first's.
std::string shared_id(void* communicator, int device, int rank, double seconds) {
  std::string id = rank == 0 ? new_unique_id() : std::string(kUniqueIdBytes, '\0');
  const cuda::ScopedDevice scope(device);
  CUstream stream = nullptr;
  check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "making a stream");
  CUdeviceptr words = 0;
  check(driver().cuMemAlloc(&words, kUniqueIdBytes), "allocating a unique id");
  check(driver().cuMemcpyHtoDAsync(words, id.data(), id.size(), stream), "sharing a unique id");
  auto* const memory = reinterpret_cast<void*>(words);
  const Deadline queued(seconds);
  int result = nccl().all_reduce(memory, memory, kUniqueIdBytes / sizeof(int32_t), Nccl::kInt32, Nccl::kSum,
                                 communicator, stream);
  while (result == Nccl::kInProgress && !queued.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    check_nccl(nccl().async_error(communicator, &result), "ncclCommGetAsyncError");
  }
  check_nccl(result, "ncclAllReduce");
  // After a time-out the stream and the memory are left to NCCL's kernel: freeing them would wait for it.
  wait_for_stream(stream, Deadline(seconds), "the ranks of the communicator");
  check(driver().cuMemcpyDtoHAsync(id.data(), words, id.size(), stream), "sharing a unique id");
  wait_for_stream(stream, Deadline(seconds), "a unique id");
  driver().cuMemFree(words);
  driver().cuStreamDestroy(stream);
  return id;
}

}  // namespace

std::string share_unique_id_over(void* communicator, int device, int& rank, int& ranks, double seconds) {
  check_nccl(nccl().rank_of(communicator, &rank), "ncclCommUserRank");
  check_nccl(nccl().count_of(communicator, &ranks), "ncclCommCount");
  if (ranks == 1) return new_unique_id();
  // A communicator's first collective call waits on the host until all ranks have made it, so it is made in a thread
  // that can be left behind.
  auto result = std::make_shared<std::promise<std::string>>();
  std::future<std::string> id = result->get_future();
  const auto share = [=, own_rank = rank] {
    try {
      result->set_value(shared_id(communicator, device, own_rank, seconds));
    } catch (...) {
      result->set_exception(std::current_exception());
    }
  };
  try {
    std::thread(share).detach();
  } catch (const std::system_error& error) {
    throw Error(Status::kOutOfMemory, std::string("communicator: no thread for its first call: ") + error.what());
  }
  const auto limit = std::chrono::duration<double>(std::min(seconds, 1e8));
  if (id.wait_for(limit) != std::future_status::ready) {
    throw Error(Status::kTimeout, "communicator: not all of its " + std::to_string(ranks) + " ranks came within " +
                                      Deadline(seconds).text());
  }
  return id.get();
}

}  // namespace uniep
