#include "uniep/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <thread>

#include "api/check_call.h"
#include "comm/bootstrap.h"
#include "engine/cpu/engine.h"
#include "engine/cuda/calls/engine.h"
#include "model/refuse.h"

namespace uniep {
namespace {

constexpr int kMaxRanks = 64;
constexpr int kMaxWorkers = 1024;
constexpr double kDefaultTimeoutSeconds = 60;
constexpr double kDefaultArrivalTimeoutSeconds = 600;

void* heap_allocate(void*, std::size_t bytes, std::size_t alignment, int, Stream) {
  return ::operator new(bytes, std::align_val_t(alignment), std::nothrow);
}
void heap_release(void*, void* memory, std::size_t, int, Stream) {
  ::operator delete(memory, std::align_val_t(256));
}

// The most leaves room for alignment, and for an offset beside it, in 64 bits with a sign.
void check_symmetric_bytes(std::size_t bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 62;
  if (bytes == 0) refuse("bytes: 0; symmetric memory has at least one");
  if (bytes > kMost) refuse(fmt::format("bytes: {}; symmetric memory has at most {}", bytes, kMost));
}

bool is_timeout(double seconds) {
  return seconds > 0 && seconds <= kMaxTimeoutSeconds;  // and no NaN
}

// As strtod() reads it in the C locale, whatever the process has set; NaN for anything else.
double number_of(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  if (text.starts_with('+')) text.remove_prefix(1);
  const bool hex = text.starts_with("0x") || text.starts_with("0X");
  if (hex) text.remove_prefix(2);
  double value = 0;
  const std::from_chars_result read = std::from_chars(text.data(), text.data() + text.size(), value,
                                                      hex ? std::chars_format::hex : std::chars_format::general);
  const bool whole = read.ec == std::errc() && read.ptr == text.data() + text.size();
  return whole ? value : std::numeric_limits<double>::quiet_NaN();
}

// A limit that was given, or `variable`'s, or `otherwise`.
double limit_of(double given, const char* name, const char* variable, double otherwise) {
  if (given != 0) {
    if (!is_timeout(given)) {
      refuse(fmt::format("{}: {}; must be above 0 and at most {:.0f} seconds, or 0 for {}'s", name, given,
                         kMaxTimeoutSeconds, variable));
    }
    return given;
  }
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == 0) return otherwise;
  const double seconds = number_of(text);
  if (!is_timeout(seconds)) {
    refuse(fmt::format("{}: '{}'; must be above 0 and at most {:.0f} seconds", variable, text, kMaxTimeoutSeconds));
  }
  return seconds;
}

// Unset, 0 or 1.
bool is_set(const char* variable) {
  const char* const given = std::getenv(variable);
  const std::string text = given == nullptr || *given == 0 ? "0" : given;
  if (text != "0" && text != "1") refuse(fmt::format("{}: '{}'; legal are 0 and 1", variable, text));
  return text == "1";
}

const internal::SymmetricBlock& block_of(const std::shared_ptr<internal::SymmetricBlock>& block) {
  if (block == nullptr) refuse("buffer: empty; it comes from Group::allocate_symmetric() or register_symmetric()");
  return *block;
}

void check_local_rank(const Group& group, int rank) {
  check_index(rank, group.first_local_rank(), group.first_local_rank() + group.local_ranks(), "rank");
}

// Checks what was given and fills what was not.
GroupOptions completed(GroupOptions options) {
  if (options.ranks < 1 || options.ranks > kMaxRanks) {
    refuse(fmt::format("ranks: {}; must be 1 to {}", options.ranks, kMaxRanks));
  }
  if (options.workers < 0 || options.workers > kMaxWorkers) {
    refuse(fmt::format("workers: {}; must be 1 to {}, or 0 for the engine's choice", options.workers, kMaxWorkers));
  }
  if ((options.allocator.allocate == nullptr) != (options.allocator.release == nullptr)) {
    refuse("allocator: give both functions or neither");
  }
  options.timeout_seconds =
      limit_of(options.timeout_seconds, "timeout_seconds", "UNIEP_TIMEOUT_S", kDefaultTimeoutSeconds);
  options.arrival_timeout_seconds = limit_of(options.arrival_timeout_seconds, "arrival_timeout_seconds",
                                             "UNIEP_ARRIVAL_TIMEOUT_S", kDefaultArrivalTimeoutSeconds);
  options.nan_on_overflow |= is_set("UNIEP_NAN_ON_OVERFLOW");
  return options;
}

GroupOptions completed_for_cpu(GroupOptions options) {
  if (options.launch == Launch::kProcesses) {
    throw Error(Status::kUnsupported,
                "launch: processes needs the cuda engine; the cpu engine runs all ranks in one process (threads)");
  }
  if (options.allocator.allocate == nullptr) options.allocator = {heap_allocate, heap_release, nullptr};
  if (options.workers == 0) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    options.workers = std::max(2, cores / options.ranks);
  }
  return options;
}

std::unique_ptr<internal::Engine> make_engine(const GroupOptions& given) {
  const GroupOptions options = completed(given);
  const bool cuda =
      options.engine == EngineKind::kCuda || (options.engine == EngineKind::kAuto && cuda::has_hopper_gpu());
  if (cuda) return cuda::make_engine(options);
  return std::make_unique<cpu::CpuEngine>(completed_for_cpu(options));
}

}  // namespace

std::string make_unique_id() {
  return new_unique_id();
}

Group::Group(const GroupOptions& options) : engine_(api::with_heap([&] { return make_engine(options); })) {}
Group::~Group() = default;
Group::Group(Group&&) noexcept = default;
Group& Group::operator=(Group&&) noexcept = default;

int Group::ranks() const {
  return engine_->ranks();
}
int Group::workers() const {
  return engine_->workers();
}
EngineKind Group::engine() const {
  return engine_->kind();
}
Machine Group::machine() const {
  return engine_->machine();
}
int Group::first_local_rank() const {
  return engine_->first_local_rank();
}
int Group::local_ranks() const {
  return engine_->local_ranks();
}
int Group::device(int rank) const {
  check_local_rank(*this, rank);
  return engine_->device(rank);
}
SymmetricBuffer Group::allocate_symmetric(std::size_t bytes) {
  return api::collective(*this, [&] {
    check_symmetric_bytes(bytes);
    return SymmetricBuffer(engine_->allocate_symmetric(bytes));
  });
}
SymmetricBuffer Group::register_symmetric(std::span<void* const> memory, std::size_t bytes) {
  return api::collective(*this, [&] {
    check_symmetric_bytes(bytes);
    if (memory.size() != static_cast<std::size_t>(local_ranks())) {
      refuse(fmt::format("memory: {} addresses given; one for each of the {} local ranks is needed", memory.size(),
                         local_ranks()));
    }
    // With a process a rank all ranks hear of it where they share the memory.
    for (int rank = 0; local_ranks() == ranks() && rank < ranks(); ++rank) {
      api::check_array(memory[static_cast<std::size_t>(rank)], "memory", rank, true);
    }
    return SymmetricBuffer(engine_->register_symmetric(memory, bytes));
  });
}
void Group::leave() noexcept {
  try {
    api::inside(*this, [&] { engine_->leave(); });
  } catch (const Error&) {  // aborted: that has told the others
  }
}
void Group::abort() noexcept {
  if (engine_->gate().close()) engine_->end_calls();
}
void Group::trim() {
  api::inside(*this, [&] { engine_->trim(); });
}
void* SymmetricBuffer::data(int rank) const {
  const internal::RankSpan local = block_of(block_).local();
  check_index(rank, local.first, local.first + local.count, "rank");
  return block_->data(rank);
}
std::size_t SymmetricBuffer::bytes() const {
  return block_of(block_).bytes();
}
void Group::synchronize() {
  api::inside(*this, [&] { engine_->synchronize(); });
}
void Group::check() {
  api::inside(*this, [&] { engine_->throw_failures(); });
}
GroupMemory Group::memory(int rank) const {
  check_local_rank(*this, rank);
  return api::inside(*this, [&] { return engine_->memory(rank); });
}
void Group::recover() {
  api::inside(*this, [&] { engine_->recover(); });
}

}  // namespace uniep
