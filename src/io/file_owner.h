#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "io/descriptor.h"

namespace uniep::io {

// Says that a file is this object's, to all processes that ask, on all machines that share its folder: a lock on
// "FILE.lock", which goes with the object and with its process. Where the folder can not be written, or its file system
// knows no locks, everybody is the owner.
class FileOwner {
 public:
  // None where the file has another owner.
  static std::optional<FileOwner> take(const std::filesystem::path& file);
  // Whether take() would give none.
  static bool has_owner(const std::filesystem::path& file);

  ~FileOwner();
  FileOwner(FileOwner&&) = default;
  FileOwner& operator=(FileOwner&& other) noexcept {
    std::swap(lock_, other.lock_);
    std::swap(held_, other.held_);
    return *this;
  }

 private:
  FileOwner(std::string lock, Descriptor held) : lock_(std::move(lock)), held_(std::move(held)) {}

  std::string lock_;
  Descriptor held_;  // none: nothing could be locked
};

}  // namespace uniep::io
