#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// Files. Every failure throws Error(kIo) that names the file and the reason.
namespace uniep::io {

// The bytes of a regular file, or of a pipe or device up to 1 GiB (more is refused).
std::vector<std::byte> read_file(const std::filesystem::path& path);
std::string read_text_file(const std::filesystem::path& path);

// A regular file mapped read-only, so that only what is touched is read. The file must not be shortened meanwhile: the
// system then kills the process that reads beyond its end.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Writes a file so that others see its old state or its new one, whole: a temporary in the same folder, renamed by
// commit(), removed without it. What can not be replaced (a pipe, a device such as /dev/full, /dev/stdout, /proc/...)
// is written directly and at once. After a failure or commit() the object refuses everything.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  void commit();

  const std::filesystem::path& path() const { return path_; }

 private:
  void open_temporary();
  void require_open(const char* action) const;
  [[noreturn]] void fail(const char* action, int error_number);
  void discard() noexcept;
  void forget_temporary() noexcept;

  std::filesystem::path path_;
  std::filesystem::path target_;     // path_ with symbolic links followed
  std::filesystem::path temporary_;  // empty when written directly
  int descriptor_ = -1;
  int noted_ = -1;  // where remove_temporaries_at_signals() finds temporary_
};

// From now on SIGHUP, SIGINT and SIGTERM remove the temporaries of all AtomicFiles before they end the process. A
// signal that is ignored stays so.
void remove_temporaries_at_signals();

// While this lives, these signals remove that file, too. No other end of the process does.
class RemovedAtSignals {
 public:
  explicit RemovedAtSignals(const std::filesystem::path& path);
  ~RemovedAtSignals();
  RemovedAtSignals(const RemovedAtSignals&) = delete;
  RemovedAtSignals& operator=(const RemovedAtSignals&) = delete;

 private:
  int noted_ = -1;
};

// AtomicFile in one call.
void write_file(const std::filesystem::path& path, std::string_view text);

}  // namespace uniep::io
