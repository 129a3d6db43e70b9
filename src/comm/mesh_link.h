#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "io/descriptor.h"
#include "uniep/error.h"

namespace uniep {

struct MeshFailure {
  Error error;
  uint64_t death = 0;  // the member whose process is gone, if that is why
  bool news = true;    // no earlier mesh of this process has ended with that death
};

// What one rank of a mesh has of another: a socket for collectives, a second one for words about failures, which no
// collective holds up, and a descriptor of its process, where the system has them (a child that it has forked may keep
// its sockets open after its death).
class MeshLink {
 public:
  MeshLink() = default;
  // `member`: a number that no other part in any mesh has.
  MeshLink(int peer, uint64_t member, Descriptor data, Descriptor control, Descriptor process)
      : peer_(peer),
        member_(member),
        data_(std::move(data)),
        control_(std::move(control)),
        process_(std::move(process)) {}

  explicit operator bool() const { return static_cast<bool>(control_); }
  int peer() const { return peer_; }
  int data() const { return data_.number(); }

  // To be polled for POLLIN before failure() is asked again; -1: nothing more will come.
  int control() const { return over_ ? -1 : control_.number(); }
  int process() const { return over_ ? -1 : process_.number(); }

  // Why the peer can not go on, if it has said so or its process is gone; does not wait.
  std::optional<MeshFailure> failure();
  // It has ended its part in the mesh, in order.
  bool left() const { return left_; }
  // The last call that it has said it takes no part in, and why.
  struct Refusal {
    uint32_t call;
    std::string why;
  };
  const std::optional<Refusal>& refusal() const { return refusal_; }

  // While ranks meet: the peer knows of this link, which is no death if it breaks off before; and has links to all.
  bool known() const { return known_; }
  bool ready() const { return ready_; }
  // Whether it may have gone on, having met all: it needs this rank's word, too.
  bool may_have_gone_on() const { return ready_ && told_ready_; }
  void set_known() { known_ = true; }
  void tell_known() noexcept { send({Word::kKnown, 0, 0, 0, {}}); }
  void tell_ready() noexcept {
    if (!std::exchange(told_ready_, true)) send({Word::kReady, 0, 0, 0, {}});
  }

  // Best effort: do not wait.
  void tell_failure(const MeshFailure& failure) noexcept;
  void tell_left() noexcept;
  void tell_refused(uint32_t call, const char* why) noexcept;

 private:
  enum class Word : uint32_t { kFailed = 1, kLeft, kKnown, kReady, kRefused };
  struct Message {
    Word word;
    int32_t status;
    uint64_t death;  // kRefused: the call
    uint32_t size;
    char text[2028];
  };
  void send(const Message& message) noexcept;
  void send(Message message, const char* text) noexcept;

  int peer_ = -1;
  uint64_t member_ = 0;
  Descriptor data_, control_, process_;
  bool left_ = false;
  bool known_ = false;
  bool ready_ = false;
  bool told_ready_ = false;
  bool over_ = false;
  std::optional<Refusal> refusal_;
};

}  // namespace uniep
