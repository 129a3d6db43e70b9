#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace uniep::io {

// Says that a file is this object's, to all processes that ask, on all machines that share its folder: a lock on
// "FILE.lock", which goes with the object and with its process, whatever children that has forked: they own nothing.
// Where the folder can not be written, or its file system knows no locks, everybody is the owner.
class FileOwner {
 public:
  // None where the file has another owner.
  static std::optional<FileOwner> take(const std::filesystem::path& file);
  // Whether take() would give none.
  static bool has_owner(const std::filesystem::path& file);

  ~FileOwner();
  FileOwner(FileOwner&&) noexcept;
  FileOwner& operator=(FileOwner&& other) noexcept;

 private:
  class LockFile;
  FileOwner(std::string lock, std::unique_ptr<LockFile> held);

  std::string lock_;
  std::unique_ptr<LockFile> held_;  // none: nothing could be locked
};

}  // namespace uniep::io
