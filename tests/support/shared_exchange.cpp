#include "support/shared_exchange.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>

#include "tune/rank_names.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

constexpr int64_t kMessages = 8;  // that may be under way
constexpr std::size_t kMaxBytes = 32 * 1024;

}  // namespace

struct SharedMailboxes::Mail {
  int64_t number;  // of the message in it, or -1
  std::size_t size;
  std::byte bytes[kMaxBytes];
};

struct SharedMailboxes::Head {
  pthread_mutex_t mutex;
  pthread_cond_t given;
};

SharedMailboxes::SharedMailboxes(int ranks)
    : ranks_(ranks), bytes_(sizeof(Head) + static_cast<std::size_t>(ranks * kMessages) * sizeof(Mail)) {
  void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no shared memory");
  head_ = new (memory) Head;
  pthread_mutexattr_t mutex;
  pthread_mutexattr_init(&mutex);
  pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&head_->mutex, &mutex);
  pthread_condattr_t given;
  pthread_condattr_init(&given);
  pthread_condattr_setpshared(&given, PTHREAD_PROCESS_SHARED);
  pthread_condattr_setclock(&given, CLOCK_MONOTONIC);
  pthread_cond_init(&head_->given, &given);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t number = 0; number < kMessages; ++number) mail(rank, number).number = -1;
  }
}

SharedMailboxes::~SharedMailboxes() {
  ::munmap(head_, bytes_);
}

SharedMailboxes::Mail& SharedMailboxes::mail(int rank, int64_t number) const {
  auto* const first = reinterpret_cast<Mail*>(reinterpret_cast<std::byte*>(head_) + sizeof(Head));
  return first[rank * kMessages + number % kMessages];
}

void SharedMailboxes::give(int rank, int64_t number, std::span<const std::byte> own) {
  if (own.size() > kMaxBytes) throw std::runtime_error("a message of " + std::to_string(own.size()) + " bytes");
  pthread_mutex_lock(&head_->mutex);
  Mail& to = mail(rank, number);
  to.number = number;
  to.size = own.size();
  if (!own.empty()) std::memcpy(to.bytes, own.data(), own.size());
  pthread_cond_broadcast(&head_->given);
  pthread_mutex_unlock(&head_->mutex);
}

std::vector<std::vector<std::byte>> SharedMailboxes::take(int64_t number, double seconds) {
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += static_cast<time_t>(seconds);
  until.tv_nsec += static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9);
  if (until.tv_nsec >= 1000000000) ++until.tv_sec, until.tv_nsec -= 1000000000;
  std::vector<std::vector<std::byte>> all;
  std::vector<int> missing;
  pthread_mutex_lock(&head_->mutex);
  for (bool late = false;;) {
    missing.clear();
    for (int rank = 0; rank < ranks_; ++rank) {
      if (mail(rank, number).number != number) missing.push_back(rank);
    }
    if (missing.empty() || late) break;
    late = pthread_cond_timedwait(&head_->given, &head_->mutex, &until) == ETIMEDOUT;
  }
  for (int rank = 0; rank < ranks_ && missing.empty(); ++rank) {
    const Mail& from = mail(rank, number);
    all.emplace_back(from.bytes, from.bytes + from.size);
  }
  pthread_mutex_unlock(&head_->mutex);
  if (missing.empty()) return all;
  throw Error(Status::kTimeout, "exchange: " + tune::rank_names(missing, "gave", "gave") + " nothing");
}

}  // namespace uniep::test
