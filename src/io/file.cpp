#include "io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "io/descriptor.h"
#include "io/quote.h"
#include "uniep/error.h"

namespace uniep::io {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kSpecialFileLimit = std::size_t{1} << 30;
constexpr std::size_t kFirstRead = std::size_t{1} << 16;

[[noreturn]] void throw_io(const fs::path& path, const std::string& action, const std::string& reason) {
  throw Error(Status::kIo, "cannot " + action + " file " + quote_path(path.native()) + ": " + reason);
}

std::string reason_of(int error_number) {
  return std::generic_category().message(error_number);
}

int open_for_reading(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
  if (descriptor < 0) throw_io(path, "read", reason_of(errno));
  return descriptor;
}

struct stat status_for_reading(int descriptor, const fs::path& path) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) throw_io(path, "read", reason_of(errno));
  if (S_ISDIR(status.st_mode)) throw_io(path, "read", "it is a directory");
  return status;
}

template <class Buffer>
Buffer read_all(const fs::path& path) {
  const Descriptor descriptor(open_for_reading(path));
  const struct stat status = status_for_reading(descriptor.number(), path);
  // One byte more than the file has, so that its end is seen without growing. Files of /proc claim to have none.
  const bool sized = S_ISREG(status.st_mode) && status.st_size > 0;
  Buffer buffer;
  std::size_t used = 0;
  try {
    buffer.resize(sized ? static_cast<std::size_t>(status.st_size) + 1 : kFirstRead);
    while (true) {
      const ssize_t got = ::read(descriptor.number(), buffer.data() + used, buffer.size() - used);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_io(path, "read", reason_of(errno));
      if (got == 0) break;
      used += static_cast<std::size_t>(got);
      if (!sized && used > kSpecialFileLimit) throw_io(path, "read", "it is no regular file and goes on after 1 GiB");
      if (used == buffer.size()) buffer.resize(buffer.size() * 2);
    }
  } catch (const std::bad_alloc&) {
    throw Error(Status::kOutOfMemory, "file " + quote_path(path.native()) + " does not fit into memory");
  } catch (const std::length_error&) {
    throw Error(Status::kOutOfMemory, "file " + quote_path(path.native()) + " does not fit into memory");
  }
  buffer.resize(used);
  return buffer;
}

// Names of open descriptors of this process: renaming a file over them would not reach the reader.
bool is_descriptor_path(const fs::path& path) {
  const std::string& name = path.native();
  return name == "/dev/stdout" || name == "/dev/stderr" || name.starts_with("/dev/fd/") || name.starts_with("/proc/");
}

// The names of temporaries in memory of their own, since a signal may come at any moment. What has no room here stays
// behind after a signal.
struct NotedTemporary {
  enum State : int { kFree, kTaken, kNoted };
  std::atomic<int> state{kFree};
  char name[PATH_MAX];
};
constexpr int kMostNoted = 16;
NotedTemporary noted_temporaries[kMostNoted];
static_assert(std::atomic<int>::is_always_lock_free, "read in a signal handler");

int note_temporary(const fs::path& name) {
  if (name.native().size() >= PATH_MAX) return -1;
  for (int i = 0; i < kMostNoted; ++i) {
    NotedTemporary& noted = noted_temporaries[i];
    int free = NotedTemporary::kFree;
    if (!noted.state.compare_exchange_strong(free, NotedTemporary::kTaken)) continue;
    std::strcpy(noted.name, name.c_str());
    noted.state = NotedTemporary::kNoted;
    return i;
  }
  return -1;
}

void remove_noted_temporaries(int signal) {
  for (const NotedTemporary& noted : noted_temporaries) {
    if (noted.state == NotedTemporary::kNoted) ::unlink(noted.name);
  }
  // As it is without this handler. NVRTC puts its own in front, which stays and blocks the signal while it calls this
  // one: raised again, it would come here for ever.
  ::signal(signal, SIG_DFL);
  sigset_t own;
  ::sigemptyset(&own);
  ::sigaddset(&own, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
  ::raise(signal);
  ::_exit(128 + signal);  // the first process of a container is not ended by a signal of its own
}

}  // namespace

RemovedAtSignals::RemovedAtSignals(const fs::path& path) : noted_(note_temporary(path)) {}

RemovedAtSignals::~RemovedAtSignals() {
  if (noted_ >= 0) noted_temporaries[noted_].state = NotedTemporary::kFree;
}

void remove_temporaries_at_signals() {
  for (const int signal : {SIGHUP, SIGINT, SIGTERM}) {
    struct sigaction before {};
    if (::sigaction(signal, nullptr, &before) != 0 || before.sa_handler != SIG_DFL) continue;
    struct sigaction action {};
    action.sa_handler = remove_noted_temporaries;
    action.sa_flags = SA_RESETHAND | SA_NODEFER;
    ::sigaction(signal, &action, nullptr);
  }
}

std::vector<std::byte> read_file(const fs::path& path) {
  return read_all<std::vector<std::byte>>(path);
}

std::string read_text_file(const fs::path& path) {
  return read_all<std::string>(path);
}

MappedFile::MappedFile(const fs::path& path) {
  const Descriptor descriptor(open_for_reading(path));
  const struct stat status = status_for_reading(descriptor.number(), path);
  if (!S_ISREG(status.st_mode)) throw_io(path, "map", "it is not a regular file");
  if (status.st_size == 0) return;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.number(), 0);
  if (address == MAP_FAILED) throw_io(path, "map", reason_of(errno));
  data_ = static_cast<const std::byte*>(address);
  size_ = size;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)) {
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0;
  if (!exists && errno != ENOENT) fail("write", errno);
  if (exists && S_ISDIR(status.st_mode)) fail("write", EISDIR);
  if (exists && (!S_ISREG(status.st_mode) || is_descriptor_path(path_))) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NOCTTY);
    if (descriptor_ < 0) fail("write", errno);
    return;
  }
  std::error_code error;
  target_ = exists ? fs::canonical(path_, error) : path_;
  if (error) fail("write", error.value());
  if (!exists && fs::is_symlink(fs::symlink_status(path_, error))) {
    throw_io(path_, "write", "it is a symbolic link to nothing");
  }
  open_temporary();
  // The new file keeps the permissions of the one that it replaces.
  if (exists && ::fchmod(descriptor_, status.st_mode & 0777) != 0) fail("set the permissions of", errno);
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::open_temporary() {
  static std::atomic<unsigned> counter{0};
  if (target_.filename().empty()) fail("write", path_.empty() ? ENOENT : EISDIR);
  int error_number = 0;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const unsigned number = counter.fetch_add(1, std::memory_order_relaxed);
    fs::path name = target_;
    name.replace_filename(".uniep-" + std::to_string(::getpid()) + "-" + std::to_string(number) + ".tmp");
    descriptor_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) {
      temporary_ = std::move(name);
      noted_ = note_temporary(temporary_);
      return;
    }
    error_number = errno;
    if (error_number != EEXIST) break;
  }
  const std::string folder = target_.has_parent_path() ? target_.parent_path().native() : ".";
  throw_io(path_, "write", "no file can be made in " + quote_path(folder) + ": " + reason_of(error_number));
}

void AtomicFile::require_open(const char* action) const {
  if (descriptor_ < 0) throw_io(path_, action, "it was committed before, or an earlier write to it failed");
}

void AtomicFile::fail(const char* action, int error_number) {
  discard();
  throw_io(path_, action, reason_of(error_number));
}

void AtomicFile::discard() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  forget_temporary();
}

void AtomicFile::forget_temporary() noexcept {
  temporary_.clear();
  if (noted_ >= 0) noted_temporaries[noted_].state = NotedTemporary::kFree;
  noted_ = -1;
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  require_open("write");
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("write", written < 0 ? errno : EIO);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::write(std::string_view text) {
  write(std::as_bytes(std::span(text)));
}

void AtomicFile::commit() {
  require_open("commit");
  if (!temporary_.empty() && ::fsync(descriptor_) != 0) fail("flush", errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("close", errno);
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("replace", errno);
  forget_temporary();
}

void write_file(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace uniep::io
