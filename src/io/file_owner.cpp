#include "io/file_owner.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "io/descriptor.h"

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

// False if it has an owner. Who asks has_owner() shares the lock for a moment, and is none.
bool try_to_own(const Descriptor& file) {
  constexpr int kAttempts = 50;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (try_lock(file, LOCK_EX)) return true;
    if (!try_lock(file, LOCK_SH)) return false;
    ::flock(file.number(), LOCK_UN);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// An owner that has gone meanwhile has taken the name with it.
bool is_at(const Descriptor& file, const std::string& path) {
  struct stat opened {
  }, named{};
  return ::fstat(file.number(), &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

// What a fork()ed child closes at once: a lock is its open file's, which parent and child share, so that it would live
// on in a child when its owner has crashed. Under the mutex nothing is allocated: heaps have handlers at forks, too.
class OpenLocks {
 public:
  using File = std::list<Descriptor>::iterator;

  static OpenLocks& of_process() {
    static auto* const locks = new OpenLocks;  // not destroyed: a child may be forked while the process ends
    return *locks;
  }
  File open(const std::string& path, int flags) {
    std::list<Descriptor> one(1);
    const File file = one.begin();
    const std::lock_guard lock(mutex_);  // no fork comes between
    *file = Descriptor(::open(path.c_str(), flags | O_CLOEXEC, 0644));
    files_.splice(files_.end(), one);
    return file;
  }
  void close(File file) {
    std::list<Descriptor> one;
    const std::lock_guard lock(mutex_);
    *file = Descriptor();
    one.splice(one.end(), files_, file);
  }

 private:
  OpenLocks() {
    ::pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                     [] {
                       for (Descriptor& file : of_process().files_) file = Descriptor();
                       of_process().mutex_.unlock();
                     });
  }

  std::mutex mutex_;
  std::list<Descriptor> files_;
};

}  // namespace

class FileOwner::LockFile {
 public:
  LockFile(const std::string& path, int flags) : file_(OpenLocks::of_process().open(path, flags)) {}
  ~LockFile() { OpenLocks::of_process().close(file_); }
  LockFile(const LockFile&) = delete;
  LockFile& operator=(const LockFile&) = delete;

  const Descriptor& file() const { return *file_; }  // none in a child

 private:
  const OpenLocks::File file_;
};

std::optional<FileOwner> FileOwner::take(const std::filesystem::path& file) {
  constexpr int kAttempts = 16;
  std::string lock = lock_of(file);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    auto held = std::make_unique<LockFile>(lock, O_RDWR | O_CREAT);
    if (!held->file()) break;
    if (!try_to_own(held->file())) return std::nullopt;
    if (is_at(held->file(), lock)) return FileOwner(std::move(lock), std::move(held));
  }
  return FileOwner(std::move(lock), nullptr);
}

bool FileOwner::has_owner(const std::filesystem::path& file) {
  const LockFile asked(lock_of(file), O_RDONLY);
  return asked.file() && !try_lock(asked.file(), LOCK_SH);
}

FileOwner::FileOwner(std::string lock, std::unique_ptr<LockFile> held)
    : lock_(std::move(lock)), held_(std::move(held)) {}

FileOwner::~FileOwner() {
  if (held_ && held_->file()) ::unlink(lock_.c_str());
}

FileOwner::FileOwner(FileOwner&&) noexcept = default;

FileOwner& FileOwner::operator=(FileOwner&& other) noexcept {
  std::swap(lock_, other.lock_);
  std::swap(held_, other.held_);
  return *this;
}

}  // namespace uniep::io
