#pragma once

#include <pthread.h>

#include <cstdint>
#include <memory>

#include "uniep/tuner.h"

namespace uniep::test {

// Memory that processes forked later share, and in it what ranks give each other.
class SharedMailboxes {
 public:
  explicit SharedMailboxes(int ranks);
  ~SharedMailboxes();
  SharedMailboxes(const SharedMailboxes&) = delete;
  SharedMailboxes& operator=(const SharedMailboxes&) = delete;

  int ranks() const { return ranks_; }
  void give(int rank, int64_t number, std::span<const std::byte> own);
  std::vector<std::vector<std::byte>> take(int64_t number, double seconds);

 private:
  struct Mail;
  struct Head;
  Mail& mail(int rank, int64_t number) const;

  int ranks_;
  std::size_t bytes_;
  Head* head_;
};

// A rank's end of it.
class SharedExchange : public TunerExchange {
 public:
  SharedExchange(SharedMailboxes& mailboxes, int rank, double seconds = 60)
      : mailboxes_(mailboxes), rank_(rank), seconds_(seconds) {}
  void give(int64_t number, std::span<const std::byte> own) override { mailboxes_.give(rank_, number, own); }
  std::vector<std::vector<std::byte>> take(int64_t number) override { return mailboxes_.take(number, seconds_); }

 private:
  SharedMailboxes& mailboxes_;
  int rank_;
  double seconds_;
};

}  // namespace uniep::test
