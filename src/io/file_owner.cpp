#include "io/file_owner.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace uniep::io {
namespace {

std::string lock_of(const std::filesystem::path& file) {
  return file.string() + ".lock";
}

// False if another one holds it.
bool try_lock(const Descriptor& file, int kind) {
  int result = 0;
  do {
    result = ::flock(file.number(), kind | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  return result == 0 || errno != EWOULDBLOCK;
}

// An owner that has gone meanwhile has taken the name with it.
bool is_at(const Descriptor& file, const std::string& path) {
  struct stat opened {
  }, named{};
  return ::fstat(file.number(), &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

}  // namespace

std::optional<FileOwner> FileOwner::take(const std::filesystem::path& file) {
  constexpr int kAttempts = 16;
  std::string lock = lock_of(file);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    Descriptor held(::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    if (!held) break;
    if (!try_lock(held, LOCK_EX)) return std::nullopt;
    if (is_at(held, lock)) return FileOwner(std::move(lock), std::move(held));
  }
  return FileOwner(std::move(lock), Descriptor());
}

bool FileOwner::has_owner(const std::filesystem::path& file) {
  const Descriptor asked(::open(lock_of(file).c_str(), O_RDONLY | O_CLOEXEC));
  return asked && !try_lock(asked, LOCK_SH);
}

FileOwner::~FileOwner() {
  if (held_) ::unlink(lock_.c_str());
}

}  // namespace uniep::io
