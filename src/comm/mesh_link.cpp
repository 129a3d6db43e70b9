#include "comm/mesh_link.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <set>

namespace uniep {
namespace {

// False if it was known.
bool note_death(uint64_t member) {
  static std::mutex noting;
  static std::set<uint64_t> known;
  const std::lock_guard lock(noting);
  return known.insert(member).second;
}

}  // namespace

std::optional<MeshFailure> MeshLink::failure() {
  while (!over_) {
    pollfd process{process_.number(), POLLIN, 0};
    const bool gone = process_ && ::poll(&process, 1, 0) == 1;  // asked first: its last words are there by then
    Message message{};
    const ssize_t size = ::recv(control_.number(), &message, sizeof(message), MSG_DONTWAIT);
    // ECONNRESET comes once, before what the peer said last, if it closed without having read all.
    if (size < 0 && (errno == EINTR || errno == ECONNRESET)) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && !gone) return std::nullopt;
    if (size <= 0) {
      over_ = true;
      left_ = left_ || (!known_ && !gone);
      if (left_) return std::nullopt;
      note_death(member_);
      return MeshFailure{Error(Status::kDevice, "rank " + std::to_string(peer_) + " ended (its process is gone)"),
                         member_};
    }
    if (message.word == Word::kLeft) left_ = true;
    if (message.word == Word::kKnown) known_ = true;
    if (message.word == Word::kReady) ready_ = true;
    const auto words = [&] {
      return std::string(message.text, std::min<std::size_t>(message.size, sizeof(message.text)));
    };
    if (message.word == Word::kRefused) refusal_ = {static_cast<uint32_t>(message.death), words()};
    if (message.word != Word::kFailed) continue;
    over_ = true;
    return MeshFailure{Error(static_cast<Status>(message.status), words()), message.death,
                       message.death == 0 || note_death(message.death)};
  }
  return std::nullopt;
}

void MeshLink::tell_failure(const MeshFailure& failure) noexcept {
  send({Word::kFailed, static_cast<int32_t>(failure.error.status()), failure.death, 0, {}}, failure.error.what());
}

void MeshLink::tell_refused(uint32_t call, const char* why) noexcept {
  if (!control_) return;
  // Ranks that make no calls read nothing, and words that come later are to find room.
  int unread = 0, room = 0;
  socklen_t size = sizeof(room);
  if (::ioctl(control_.number(), SIOCOUTQ, &unread) != 0) return;
  if (::getsockopt(control_.number(), SOL_SOCKET, SO_SNDBUF, &room, &size) != 0) return;
  if (unread < room / 2) send({Word::kRefused, 0, call, 0, {}}, why);
}

void MeshLink::tell_left() noexcept {
  send({Word::kLeft, 0, 0, 0, {}});
}

void MeshLink::send(Message message, const char* text) noexcept {
  message.size = static_cast<uint32_t>(std::min(std::strlen(text), sizeof(message.text)));
  std::memcpy(message.text, text, message.size);
  send(message);
}

void MeshLink::send(const Message& message) noexcept {
  if (!control_) return;
  ssize_t size = 0;
  do {
    size = ::send(control_.number(), &message, offsetof(Message, text) + message.size, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (size < 0 && errno == EINTR);
}

}  // namespace uniep
