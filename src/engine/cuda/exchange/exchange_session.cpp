#include "engine/cuda/exchange/exchange_session.h"

#include <algorithm>
#include <string>

#include "engine/cuda/driver.h"
#include "model/elementwise.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

constexpr int64_t kAlignment = 1024;
constexpr int kBeginThreads = 512;

uint64_t nanoseconds(double seconds) {
  return static_cast<uint64_t>(seconds * 1e9);
}

template <typename T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + offset);
}

}  // namespace

ExchangeSession::ExchangeSession(const ExchangeRequest& request)
    : request_(request),
      program_(std::make_unique<Program>(request.program, request.placement)),
      layout_(signal_layout(program_->rank(0))) {
  const internal::PlacementState& state = *request_.placement;
  const int64_t hidden = state.shape.hidden, topk = state.shape.topk;
  const int64_t groups = request_.program.numerics.combine_groups;
  slot_count_ = groups > 0 ? groups : topk;
  prob_chunk_count_ = divide_up(state.shape.intermediate, kProbChunkColumns);
  if (state.ranks > kMostCudaRanks || static_cast<int>(request_.devices.size()) != state.ranks) {
    throw Error(Status::kInvalidArgument, "devices: one for each of at most " + std::to_string(kMostCudaRanks) +
                                              " ranks, got " + std::to_string(request_.devices.size()) + " for " +
                                              std::to_string(state.ranks));
  }
  if (std::max(topk, slot_count_) > kMostCudaSlots) {
    throw Error(Status::kUnsupported, "topk, combine_groups: " + std::to_string(topk) + ", " + std::to_string(groups) +
                                          "; at most " + std::to_string(kMostCudaSlots) + " on cuda");
  }
  int64_t most_tokens = 1, most_rows = 1;
  for (int rank = 0; rank < state.ranks; ++rank) {
    most_tokens = std::max(most_tokens, state.rank[rank].tokens);
    most_rows = std::max(most_rows, state.padded_rows[rank]);
  }
  int64_t used = round_up(layout_.flag_total * sizeof(uint32_t), kAlignment);
  const auto carve = [&](int64_t& offset, int64_t bytes) {
    offset = used;
    used += round_up(bytes, kAlignment);
  };
  const int64_t row_bytes = hidden * static_cast<int64_t>(sizeof(BFloat16));
  carve(input_at_, most_tokens * row_bytes);
  carve(table_at_, most_rows * static_cast<int64_t>(sizeof(RowSource)));
  carve(rows_at_, most_rows * row_bytes);
  carve(slots_at_, most_tokens * slot_count_ * row_bytes);
  carve(prob_slots_at_, most_tokens * topk * static_cast<int64_t>(sizeof(float)));
  memory_ = make_local_symmetric_memory(request_.devices, used);
  signals_ = std::make_unique<Signals>(*memory_, layout_.flag_total * static_cast<int64_t>(sizeof(uint32_t)));

  ranks_.resize(state.ranks);
  for (int rank = 0; rank < state.ranks; ++rank) {
    const ScopedDevice scope(request_.devices[rank]);
    allocate_arrays(rank);
    programs_.push_back(program_->rank(rank));
    upload_tables(rank, programs_.back());
    if (gpus_.empty() || gpus_.back().device != request_.devices[rank]) {
      gpus_.push_back({request_.devices[rank], rank, 0, std::make_unique<KernelStore>(request_.devices[rank])});
    }
    ++gpus_.back().ranks;
  }
  prepare(dispatch_, request_.dispatch, ProgramPart::kDispatch);
  prepare(combine_, request_.combine, ProgramPart::kCombine);
  synchronize();
}

ExchangeSession::~ExchangeSession() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const ScopedDevice scope(request_.devices[rank]);
    driver().cuCtxSynchronize();
    for (const CUdeviceptr address : ranks_[rank].owned) driver().cuMemFree(address);
  }
}

template <typename T>
T* ExchangeSession::allocate(int rank, int64_t count) {
  CUdeviceptr address = 0;
  const size_t bytes = std::max<size_t>(16, static_cast<size_t>(count) * sizeof(T));
  cuda::check(driver().cuMemAlloc(&address, bytes), "allocating an exchange's arrays");
  ranks_[rank].owned.push_back(address);
  cuda::check(driver().cuMemsetD8Async(address, 0, bytes, nullptr), "clearing an exchange's arrays");
  return reinterpret_cast<T*>(address);
}

template <typename T>
const T* ExchangeSession::upload(int rank, const T* values, int64_t count) {
  T* const target = allocate<T>(rank, count);
  if (count == 0) return target;
  cuda::check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(target), values,
                                         static_cast<size_t>(count) * sizeof(T), nullptr),
              "uploading an exchange's tables");
  return target;
}

void ExchangeSession::upload_tables(int rank, RankProgram& p) {
  const int64_t local = p.local_experts, slots = static_cast<int64_t>(p.tokens) * p.topk;
  const int64_t padded = request_.placement->padded_rows[rank];
  const int64_t sources = p.source_begin[p.ranks];
  const auto move = [&](auto& table, int64_t count) { table = upload(rank, table, count); };
  move(p.row_of_source, sources);
  move(p.rank_of_expert, p.experts);
  move(p.counts, static_cast<int64_t>(p.ranks) * p.experts);
  move(p.source_offset, static_cast<int64_t>(p.ranks) * p.experts);
  move(p.expert_rows, p.experts);
  move(p.segment_start, p.experts);
  move(p.block_begin, local + 1);
  move(p.odd_blocks, local + 1);
  move(p.rotation, local);
  move(p.expert_block, p.experts);
  move(p.blocks_of_rank, p.ranks);
  move(p.push_begin, local * p.ranks + 1);
  move(p.push_block, local * p.ranks);
  move(p.token_block_begin, p.ranks + 1);
  move(p.tokens_of_rank, p.ranks);
  move(p.expert_of_slot, slots);
  move(p.row_of_slot, slots);
  move(p.token_order, p.tokens);
  move(p.source_begin, p.ranks + 1);
  auto* const table = at<RowSource>(memory_->address(rank, rank), table_at_);
  if (padded > 0) {
    cuda::check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(table), p.rows,
                                           static_cast<size_t>(padded) * sizeof(RowSource), nullptr),
                "uploading a row table");
  }
  p.rows = table;
}

void ExchangeSession::allocate_arrays(int rank) {
  const internal::PlacementState& state = *request_.placement;
  const int64_t hidden = state.shape.hidden, tokens = state.rank[rank].tokens, rows = state.padded_rows[rank];
  void* const own = memory_->address(rank, rank);
  Arrays& arrays = ranks_[rank].arrays;
  arrays.input = at<BFloat16>(own, input_at_);
  arrays.rows = at<BFloat16>(own, rows_at_);
  arrays.slots = at<BFloat16>(own, slots_at_);
  arrays.prob_slots = at<float>(own, prob_slots_at_);
  arrays.output_rows = allocate<BFloat16>(rank, rows * hidden);
  arrays.output = allocate<BFloat16>(rank, tokens * hidden);
  arrays.prob_chunks = allocate<float>(rank, rows * prob_chunk_count_);
  arrays.dprobs = allocate<float>(rank, tokens * state.shape.topk);
  arrays.counters = allocate<uint32_t>(rank, 2 * layout_.counter_total);
}

RankCall ExchangeSession::call_of(int rank, const RankProgram& p) {
  const Arrays& own = ranks_[rank].arrays;
  RankCall call{};
  call.program = p;
  call.layout = layout_;
  call.hidden = request_.placement->shape.hidden;
  call.intermediate = request_.placement->shape.intermediate;
  call.slot_count = static_cast<int32_t>(slot_count_);
  call.epoch = signals_->epoch(rank);
  call.counters = own.counters;
  call.report = signals_->report(rank);
  call.wait_limit_ns = nanoseconds(request_.wait_seconds);
  call.arrival_limit_ns = nanoseconds(request_.arrival_seconds);
  for (int peer = 0; peer < p.ranks; ++peer) {
    void* const memory = memory_->address(rank, peer);
    call.flags[peer] = at<uint32_t>(memory, 0);
    call.input[0][peer] = at<BFloat16>(memory, input_at_);
    call.gathered_of[0][peer] = at<BFloat16>(memory, rows_at_);
    call.slots[peer] = at<BFloat16>(memory, slots_at_);
    call.prob_slots[peer] = at<float>(memory, prob_slots_at_);
    call.rows_of[peer] = at<RowSource>(memory, table_at_);
  }
  call.output_rows = own.output_rows;
  call.output = own.output;
  call.dprobs = own.dprobs;
  call.prob_chunks = own.prob_chunks;
  call.prob_chunk_count = static_cast<int32_t>(prob_chunk_count_);
  return call;
}

void ExchangeSession::prepare(Operation& operation, const ExchangeConfig& config, ProgramPart part) {
  operation.config = config;
  operation.kernel = exchange_request(config);
  for (const Gpu& gpu : gpus_) {
    const ScopedDevice scope(gpu.device);
    std::vector<RankCall> calls;
    for (int rank = gpu.first_rank; rank < gpu.first_rank + gpu.ranks; ++rank) {
      RankProgram program = part_of(programs_[rank], part);
      if (config.team_warps > 1) program.dynamic = false;  // the warps of a team take the same tasks
      calls.push_back(call_of(rank, program));
    }
    operation.calls.push_back(upload(gpu.first_rank, calls.data(), gpu.ranks));
    cuda::check(driver().cuCtxSynchronize(), "uploading an exchange's calls");
    gpu.kernels->get(begin_call_request(), 0);
    gpu.kernels->get(operation.kernel, exchange_shared_bytes(config));
  }
}

void ExchangeSession::run(const Operation& operation, int ranks) {
  for (size_t i = 0; i < gpus_.size(); ++i) {
    const Gpu& gpu = gpus_[i];
    const int count = std::min(gpu.ranks, ranks - gpu.first_rank);
    if (count <= 0) continue;
    const ScopedDevice scope(gpu.device);
    const RankCall* calls = operation.calls[i];
    launch_kernel(gpu.kernels->get(begin_call_request(), 0), {.grid_x = count, .threads = kBeginThreads}, &calls,
                  "begin_call");
    LayerLaunch launch{calls, 0, programs_[gpu.first_rank].workers};
    const int bytes = exchange_shared_bytes(operation.config);
    launch_kernel(gpu.kernels->get(operation.kernel, bytes),
                  {.grid_x = count * launch.workers,
                   .threads = exchange_threads(operation.config),
                   .shared_bytes = bytes,
                   .cooperative = true},
                  &launch, "exchange");
  }
}

void ExchangeSession::synchronize() {
  for (const Gpu& gpu : gpus_) {
    const ScopedDevice scope(gpu.device);
    cuda::check(driver().cuCtxSynchronize(), "waiting for an exchange");
  }
}

}  // namespace uniep::cuda
