#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>

#include "comm/deadline.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/memory/peer_access.h"
#include "engine/cuda/memory/symmetric_block.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/stream_capture.h"

// What a group does beside its layers: memory that ranks share, failures, recovery, exchanges of hosts.
namespace uniep::cuda {
namespace {}  // namespace

// ---- Inputs

CudaEngine::Inputs CudaEngine::find_input(const std::vector<RankBinding>& bindings, int operand,
                                          std::size_t bytes) const {
  Inputs inputs;
  inputs.addresses.resize(static_cast<std::size_t>(options_.ranks));
  if (!in_processes()) {
    for (const RankBinding& own : bindings) {
      inputs.addresses[static_cast<std::size_t>(own.rank)] = own.input[operand];
      for (const RankDevices::OfDevice& of : ranks_.by_device()) {
        inputs.copied |= of.device != ranks_.device_of(own.rank) && !can_read(of.device, own.input[operand]);
      }
    }
    return inputs;
  }
  const BFloat16* const own = bindings.front().input[operand];
  for (const std::weak_ptr<internal::SymmetricBlock>& buffer : buffers_) {
    const auto block = std::static_pointer_cast<SharedBlock>(buffer.lock());
    const std::ptrdiff_t offset = block != nullptr ? block->offset_of(own, bytes) : -1;
    if (offset < 0) continue;
    inputs.block = block;
    inputs.where = (block->number() * 2654435761u ^ static_cast<uint32_t>(offset / 16)) << 1 | 1;  // not 0
    for (int peer = 0; peer < options_.ranks; ++peer) {
      inputs.addresses[static_cast<std::size_t>(peer)] = static_cast<const BFloat16*>(block->address(peer, offset));
    }
    return inputs;
  }
  inputs.copied = true;
  return inputs;
}

std::vector<CudaEngine::Inputs> CudaEngine::find_inputs(const std::vector<RankBinding>& bindings,
                                                        const DeviceProgram& program, const LayerShape& shape,
                                                        const internal::PlacementState& placement) const {
  std::vector<Inputs> inputs;
  for (int operand = 0; operand < program.program.operands; ++operand) {
    Inputs found = find_input(bindings, operand, input_bytes(program, shape));
    found.copies_at = copied_operands(inputs) * most_tokens(placement) * shape.hidden;  // one behind the other
    inputs.push_back(std::move(found));
  }
  return inputs;
}

int CudaEngine::copied_operands(const std::vector<Inputs>& inputs) {
  return static_cast<int>(std::count_if(inputs.begin(), inputs.end(), [](const Inputs& each) { return each.copied; }));
}

// Into symmetric memory, where every rank reaches them.
void CudaEngine::copy_inputs(std::vector<Inputs>& inputs, const ProgramRequest& request,
                             const std::vector<RankBinding>& bindings, const std::vector<DeviceProgram>& programs,
                             const std::vector<CUstream>& streams) {
  const int first = first_local_rank();
  for (std::size_t operand = 0; operand < inputs.size(); ++operand) {
    Inputs& of = inputs[operand];
    if (capture_ != 0 && of.block != nullptr) kept_buffers_.push_back(of.block);
    if (!of.copied || request.part == ProgramPart::kCombine) continue;
    for (int rank = 0; rank < options_.ranks; ++rank) {
      of.addresses[static_cast<std::size_t>(rank)] =
          symmetric_.inputs(in_processes() ? first : rank, rank) + of.copies_at;
    }
    for (std::size_t local = 0; local < bindings.size(); ++local) {
      const std::size_t bytes = input_bytes(programs[local], request.shape);
      const BFloat16* const own = bindings[local].input[operand];
      if (bytes == 0 || own == nullptr) continue;
      const ScopedDevice scope(ranks_.devices()[local]);
      const int rank = bindings[local].rank;
      check(driver().cuMemcpyDtoDAsync(device_pointer(symmetric_.inputs(rank, rank) + of.copies_at),
                                       device_pointer(own), bytes, leader_of(rank, streams)),
            "copying x to where peers reach it");
    }
  }
}

std::shared_ptr<internal::SymmetricBlock> CudaEngine::allocate_symmetric(std::size_t bytes) {
  const BesideCapture beside;
  const uint32_t number = next_buffer_++;
  exchange_ahead_ = false;  // what fails in it all ranks agree on
  const RankMesh::OfCall of_call(ranks_.mesh().get(), call_number_);
  auto block = std::make_shared<SharedBlock>(ranks_.make_memory(static_cast<int64_t>(bytes)), bytes, number);
  std::erase_if(buffers_, [](const auto& buffer) { return buffer.expired(); });
  buffers_.push_back(block);
  return block;
}

std::shared_ptr<internal::SymmetricBlock> CudaEngine::register_symmetric(std::span<void* const> memory,
                                                                         std::size_t bytes) {
  const BesideCapture beside;
  const uint32_t number = next_buffer_++;
  exchange_ahead_ = false;  // what fails in it all ranks agree on
  const RankMesh::OfCall of_call(ranks_.mesh().get(), call_number_);
  auto block = std::make_shared<SharedBlock>(ranks_.share_memory(memory, static_cast<int64_t>(bytes)), bytes, number);
  std::erase_if(buffers_, [](const auto& buffer) { return buffer.expired(); });
  buffers_.push_back(block);
  return block;
}

// ---- Failures

int CudaEngine::failed_rank() const {
  for (int local = 0; local < ranks_.local_count(); ++local) {
    const volatile uint32_t& failed = reports_[local].failed;
    if (failed != 0) return local;
  }
  return -1;
}

void CudaEngine::throw_noticed_failures() {
  if (!lost_.empty()) throw Error(Status::kTimeout, "group: " + lost_ + "; the ranks that are left need a new Group");
  broken_ |= ranks_.is_awaited();
  if (broken_) {
    throw Error(Status::kTimeout, "group: an earlier call failed half-way; call Group::recover() before the next one");
  }
  if (placer_ != nullptr) placer_->throw_noticed_failure();
  const int failed = failed_rank();
  if (failed < 0) return;
  broken_ = true;
  lost_ = ranks_.peer_failure();
  WaitReport report{};  // what the host has of it may be half of it still
  side_.read(&report, symmetric_.signals().report(first_local_rank() + failed), sizeof(report));
  const std::string end = lost_.empty() ? "recover() makes the group usable again" : lost_ + ": a new Group is needed";
  throw Error(Status::kTimeout, describe(report) + details(report) + "; " + end);
}

// What the ranks have told each other about their calls, where a report is about that.
std::string CudaEngine::details(const WaitReport& report) {
  const int own = report.rank, peer = static_cast<int>(report.awaited.index);
  if (report.awaited.kind == SignalKind::kOtherCall) {
    CallDescription calls[kMaxCudaRanks];
    side_.read(calls, symmetric_.board(own, own)->call[report.awaited.expected & 1u], sizeof(calls));
    // Calls behind the one that failed may have left their own words there.
    const auto text = [&](int rank, uint32_t number) {
      return calls[rank].number == number ? call_text(calls[rank]) : number_text(number);
    };
    return fmt::format(": rank {} makes {}; rank {} makes {}", own,
                       text(own, static_cast<uint32_t>(report.awaited.space)), peer, text(peer, report.awaited.seen));
  }
  const bool arrival =
      report.awaited.kind == SignalKind::kFlag && report.awaited.space == static_cast<int32_t>(FlagSpace::kArrive);
  if (!arrival) return "";
  RunningNote note{};
  side_.read(&note, &symmetric_.board(own, peer)->running, sizeof(note));
  return running_text(peer, note);
}

void CudaEngine::synchronize() {
  const bool was_lost = !lost_.empty();
  synchronize_devices();
  // What is in other streams may wait for ranks that hear of a failed call from the caller alone.
  if (was_lost || broken_ || failed_rank() >= 0) throw_noticed_failures();
  // A peer that is lost now was done with all calls that have ended here: the next one says so.
  if (!lost_.empty() && !ever_captured_) {
    release_readers();
    if (placer_ != nullptr) placer_->throw_noticed_failure();
    return;
  }
  synchronize_replays();
  release_readers();
  throw_noticed_failures();
}

// As synchronize(), without replays: an exchange of hosts must not wait for what the caller has in other streams.
void CudaEngine::settle() {
  synchronize_devices();
  release_readers();
  throw_noticed_failures();
}

// Replays of captured calls run in streams that only the caller knows: waits for all of the device's, in a thread that
// can be left behind.
void CudaEngine::synchronize_replays() {
  if (!ever_captured_) return;
  struct Wait {
    std::atomic<bool> over = false;
    CUresult result = CUDA_SUCCESS;
  };
  for (const RankDevices::OfDevice& of : ranks_.by_device()) {
    const auto wait = std::make_shared<Wait>();
    const auto run = [wait, device = of.device] {
      const ScopedDevice scope(device, std::nothrow);
      wait->result = driver().cuCtxSynchronize();
      wait->over = true;
    };
    try {
      std::thread(run).detach();
    } catch (const std::system_error&) {
      run();
    }
    const Deadline deadline(options_.arrival_timeout_seconds);
    wait_until([&] { return wait->over || deadline.passed(); });
    if (!wait->over) {
      throw Error(Status::kTimeout, fmt::format("device {}: work in streams where graphs may be replayed is not over "
                                                "within {}",
                                                of.device, deadline.text()));
    }
    if (wait->result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) {
      throw Error(Status::kUnsupported,
                  fmt::format("device {}: replays can not be waited for while a stream of it is captured", of.device));
    }
    check(wait->result, "waiting for replays");
  }
}

// Waits for what was queued. If a peer is known to have died or failed meanwhile, this rank's kernels are told, so that
// they do not wait for it until their limits.
void CudaEngine::wait_until(const std::function<bool()>& over) {
  using Clock = std::chrono::steady_clock;
  // Layers take up to tens of milliseconds; waking up from a sleep would add its own share to each placement by need.
  constexpr std::chrono::milliseconds kSpin{200}, kLook{20};
  constexpr std::chrono::microseconds kPause{50};
  const Clock::time_point begin = Clock::now();
  Clock::time_point look = begin + kLook;
  // After an abort, and when a peer is lost, kernels end as soon as they are told. The caller is let go behind them: a
  // thread that frees memory they use waits for them inside the driver, and holds its lock against the one that tells
  // them. What lies before them in their streams may never end: collectives wait for the lost peer, too.
  constexpr std::chrono::seconds kEnd{15};
  bool closed = false;
  std::optional<Clock::time_point> ending;
  while (!over()) {
    const Clock::time_point now = Clock::now();
    closed = closed || gate().closed();
    if (!ending && (closed || !lost_.empty())) ending = now;
    if (ending && now - *ending > kEnd) {
      if (!closed) throw_noticed_failures();
      break;
    }
    if (now - begin > kSpin) std::this_thread::sleep_for(kPause);
    if (now < look || ending) continue;
    look = now + kLook;
    lost_ = ranks_.peer_failure();
    const int own = first_local_rank();
    for (int peer = 0; peer < options_.ranks && !lost_.empty(); ++peer) {
      if (peer != own) side_.store(symmetric_.board(own, own)->given_up[peer].number, kLeft);
    }
  }
  if (closed) internal::CallGate::throw_closed();
}

GroupMemory CudaEngine::memory(int rank) const {
  const auto local = static_cast<std::size_t>(rank - first_local_rank());
  const int device = ranks_.devices()[local];
  GroupMemory memory;
  memory.symmetric_bytes = static_cast<std::size_t>(symmetric_.bytes());
  memory.workspace_bytes = cache_->bytes(device) + counters_[local].size() + records_[local].bytes();
  return memory;
}

void CudaEngine::synchronize_devices() {
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) wait_until([&] { return queue->is_over(); });
}

void CudaEngine::recover() {
  synchronize_devices();
  if (lost_.empty()) lost_ = ranks_.peer_failure();  // also of an exchange that this rank gave up
  if (lost_.empty()) synchronize_replays();
  if (!lost_.empty()) throw_noticed_failures();
  // Until all boards are cleared: whoever waits for this rank waits for a call that it does not make.
  tell_peers(kLeft);
  try {
    ranks_.begin_again();
    symmetric_.recover([this] {
      if (placer_ != nullptr) placer_->clear();
    });
  } catch (const std::exception& why) {
    if (ranks_.peer_failure().empty()) ranks_.fail(why.what());  // the others wait for this rank's part
    throw;
  }
  std::memset(reports_.get(), 0, sizeof(WaitReport) * kMaxCudaRanks);
  broken_ = false;
  // A rank may have left out a call.
  for (uint32_t* const number : {&call_number_, &next_buffer_}) {
    for (const int64_t of_rank : all_gather(*number)) *number = std::max(*number, static_cast<uint32_t>(of_rank));
  }
}

void CudaEngine::set_epoch(uint32_t epoch) {
  settle();
  symmetric_.set_epoch(epoch);
}

void CudaEngine::tell_peers(uint32_t given_up) noexcept {
  if (!in_processes()) return;
  const unsigned turn = calls_given_up_++ % CallsGivenUp::kOfHost;
  try {
    const BesideCapture beside;  // a call that is captured may have failed
    const int own = first_local_rank();
    for (int peer = 0; peer < options_.ranks; ++peer) {
      if (peer != own) side_.store(&symmetric_.board(own, peer)->given_up[own].number[turn], given_up);
    }
  } catch (const std::exception&) {
    return;  // then their waits run out
  }
}

bool CudaEngine::is_told_by(int peer, int rank) {
  CallsGivenUp given_up{};
  side_.read(&given_up, &symmetric_.board(rank, rank)->given_up[peer], sizeof(given_up));
  return takes_no_part(given_up, 0);
}

void CudaEngine::give_up(const std::exception& why) noexcept {
  const auto* const error = dynamic_cast<const Error*>(&why);
  // Not what this rank knows of another one: the others come to know it as it did.
  const bool of_others = error != nullptr && (error->status() == Status::kTimeout || !ranks_.peer_failure().empty());
  if (of_others || agreed_) return;
  if (counted_) tell_peers(call_number_);
  // What the others may not have seen and may be in an exchange of hosts for.
  const bool alone = error == nullptr || (error->status() == Status::kOutOfMemory && exchange_ahead_) ||
                     error->status() == Status::kDevice || error->status() == Status::kInternal;
  if (alone) ranks_.fail(why.what());
  // Of these the group survives, and where all ranks refuse the call alike nobody is in its exchange.
  const bool refused =
      error != nullptr && (error->status() == Status::kInvalidArgument || error->status() == Status::kUnsupported ||
                           error->status() == Status::kOverflow);
  if (refused && exchange_ahead_) ranks_.refuse_call(call_number_, why.what());
}

void CudaEngine::leave() noexcept {
  tell_peers(kLeft);
  ranks_.fail("it has left the group");
}

// ---- The end of a group

void CudaEngine::leave_order() noexcept {
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    for (const int rank : queue->ranks()) queue->order().remove(symmetric_.board(rank, rank));
  }
}

void CudaEngine::end_calls() noexcept {
  DeviceOrder::end_waits();
  if (ranks_.mesh() != nullptr) ranks_.mesh()->interrupt();
  try {
    closing_ = std::thread([this] { close_down(); });
  } catch (const std::system_error&) {  // then the destructor does it
  }
}

// After an abort: ends the waits of this rank's kernels and of the others for it, and when nobody uses the symmetric
// memory any more it goes.
void CudaEngine::close_down() noexcept {
  if (symmetric_.is_released()) return;  // not its bytes: a call may be in reserve()
  constexpr std::chrono::milliseconds kPause{1};
  try {
    for (int own = first_local_rank(); own < first_local_rank() + local_ranks(); ++own) {
      for (int peer = 0; peer < options_.ranks; ++peer) {
        if (peer != own) side_.store(symmetric_.board(own, own)->given_up[peer].number, kLeft);
      }
    }
  } catch (const std::exception&) {  // then their waits run out
  }
  tell_peers(kLeft);
  while (!gate().is_released()) std::this_thread::sleep_for(kPause);
  ranks_.fail("it has aborted the group");
  try {
    for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
      while (!queue->is_over()) std::this_thread::sleep_for(kPause);
    }
  } catch (const std::exception&) {  // a device failed: none of its kernels runs any more
  }
  leave_order();
  placer_.reset();
  kept_buffers_.clear();
  symmetric_.release();
}

void CudaEngine::trim() {
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock(gate());
  synchronize_devices();
  release_readers();
  cache_->trim();
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->trim();
  for (std::size_t local = 0; local < counters_.size() && !ever_captured_; ++local) {
    counters_[local] = DeviceBlock();
    records_[local] = TileRecords();
  }
}

// ---- Exchanges of hosts

void CudaEngine::meet() {
  settle();
  ranks_.meet();
}

std::vector<int64_t> CudaEngine::all_gather(int64_t own) {
  if (!in_processes()) return Engine::all_gather(own);
  settle();
  std::vector<int64_t> values;
  for (const std::vector<std::byte>& bytes : ranks_.all_gather(std::as_bytes(std::span(&own, 1)))) {
    std::memcpy(&values.emplace_back(), bytes.data(), sizeof(int64_t));
  }
  return values;
}

std::vector<std::vector<std::byte>> CudaEngine::tell_all(std::span<const std::byte> own) {
  return in_processes() ? ranks_.all_gather(own) : Engine::tell_all(own);
}

void CudaEngine::gather(std::span<const std::byte> own, const Room& room) {
  if (!in_processes()) return Engine::gather(own, room);
  settle();
  const std::vector<std::vector<std::byte>> all = ranks_.all_gather(own);
  if (first_local_rank() != 0) return;
  std::size_t bytes = 0;
  for (const std::vector<std::byte>& of_rank : all) bytes += of_rank.size();
  std::byte* next = room(bytes);
  for (const std::vector<std::byte>& of_rank : all) next = std::copy(of_rank.begin(), of_rank.end(), next);
}

}  // namespace uniep::cuda
