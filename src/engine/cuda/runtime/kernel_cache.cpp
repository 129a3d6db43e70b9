#include "engine/cuda/runtime/kernel_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string_view>
#include <utility>

#include "engine/cuda/runtime/kernel_variant.h"
#include "io/cache_folder.h"
#include "io/descriptor.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

// FNV-1a, from two different starts: 128 bits of key.
uint64_t hash_text(std::string_view text, uint64_t hash) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

constexpr uint64_t kHashStart = 0xcbf29ce484222325ull;
constexpr uint64_t kOtherStart = 0x84222325cbf29ce4ull;

// All sources count, so that a changed header can not be missed.
using SourceHashes = std::pair<uint64_t, uint64_t>;
SourceHashes hashes_of(const SourceSet& sources) {
  SourceHashes hashes{kHashStart, kOtherStart};
  const auto add = [&](std::string_view text) {
    hashes.first = hash_text(std::string_view("\0", 1), hash_text(text, hashes.first));
    hashes.second = hash_text(std::string_view("\0", 1), hash_text(text, hashes.second));
  };
  for (std::size_t i = 0; i < sources.names.size(); ++i) {
    add(sources.names[i]);
    add(sources.texts[i]);
  }
  return hashes;
}

struct FileHeader {
  char magic[8];
  uint64_t key_check;
  uint64_t size;
  uint64_t check;
};
constexpr char kMagic[8] = {'U', 'N', 'I', 'E', 'P', 'K', '0', '1'};

FileHeader header_of(const std::string& key, std::string_view cubin) {
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.key_check = hash_text(key, kHashStart);
  header.size = cubin.size();
  header.check = hash_text(cubin, kHashStart);
  return header;
}

std::string name_of(const std::string& key) {
  return key + ".cubin";
}

const SourceHashes& shipped_hashes() {
  static const SourceHashes shipped = hashes_of(sources_of_kernel(""));
  return shipped;
}

}  // namespace

std::string sources_label() {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", static_cast<unsigned>(shipped_hashes().first));
  return text;
}

std::string cache_key(const KernelRequest& request) {
  const SourceSet& sources = sources_of_kernel(request.source);
  const SourceHashes hashes = sources.variant.empty() ? shipped_hashes() : hashes_of(sources);
  std::string text = "nvrtc " + compiler_version() + " " + compiler_build() + " " + request.description();
  for (const std::string& option : common_options()) text += " " + option;
  for (const std::string& option : sources.options) text += " " + option;
  if (!sources.variant.empty()) text += " variant " + sources.variant;
  text += request.text;
  char name[40];
  std::snprintf(name, sizeof(name), "%016llx%016llx", static_cast<unsigned long long>(hash_text(text, hashes.first)),
                static_cast<unsigned long long>(hash_text(text, hashes.second)));
  return name;
}

KernelCache::KernelCache() : KernelCache(cache_folder(), Stale::kGo) {
  if (std::getenv("UNIEP_CACHE_DIR") == nullptr) foreign_ = Foreign::kAbsent;
}

std::string KernelCache::path(const std::string& key) const {
  return directory_ + "/" + name_of(key);
}

namespace {

// Who else may write it, "(user 5, mode 0777)"; none where it is trusted. Root may write everywhere.
std::string writers_of(const Descriptor& opened) {
  struct stat found {};
  const bool seen = ::fstat(opened.number(), &found) == 0;
  const bool own = seen && (found.st_uid == ::geteuid() || found.st_uid == 0);
  if (own && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0) return {};
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(found.st_mode) & 07777u);
  return "(user " + std::to_string(found.st_uid) + ", mode " + mode + ")";
}

void warn_once(const std::string& line) {
  static std::atomic_flag warned;
  if (!warned.test_and_set()) std::fprintf(stderr, "uniep: warning: %s\n", line.c_str());
}

bool read_all(int file, void* to, std::size_t bytes) {
  auto* next = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t size = ::read(file, next, bytes);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return false;
    next += size;
    bytes -= static_cast<std::size_t>(size);
  }
  return true;
}

bool write_all(int file, const void* from, std::size_t bytes) {
  const auto* next = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t size = ::write(file, next, bytes);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return false;
    next += size;
    bytes -= static_cast<std::size_t>(size);
  }
  return true;
}

// Another one in each process, also where containers with the same process ids share a folder.
std::string name_aside(const std::string& name) {
  uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) return {};
  char digits[20];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(number));
  return name + "." + digits + ".new";
}

constexpr time_t kDay = 86400, kKept = 90 * kDay;  // a kernel that nobody has loaded
constexpr time_t kHalfWritten = 3600;              // what a process that has ended was writing

// Names as cache_key() and name_aside() make them: all else in the folder is somebody else's.
bool is_stale(std::string_view name, time_t age) {
  const auto take_digits = [&](std::size_t count) {
    const bool all = name.size() >= count && name.find_first_not_of("0123456789abcdef") >= count;
    if (all) name.remove_prefix(count);
    return all;
  };
  const auto take = [&](std::string_view text) {
    const bool there = name.starts_with(text);
    if (there) name.remove_prefix(text.size());
    return there;
  };
  if (!take_digits(32) || !take(".cubin")) return false;
  if (name.empty()) return age > kKept;
  return take(".") && take_digits(16) && name == ".new" && age > kHalfWritten;
}

// Of this and other versions. Another process may do the same.
void drop_stale(const Descriptor& folder) {
  const int copy = ::openat(folder.number(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(copy < 0 ? nullptr : ::fdopendir(copy), ::closedir);
  if (listing == nullptr) return;
  const time_t now = ::time(nullptr);
  while (const dirent* const entry = ::readdir(listing.get())) {
    struct stat found {};
    if (::fstatat(folder.number(), entry->d_name, &found, AT_SYMLINK_NOFOLLOW) != 0) continue;
    // Other users, who can not say that they have loaded it, leave the time of their access.
    const time_t used = std::max(found.st_mtime, found.st_atime);
    if (is_stale(entry->d_name, now - used)) ::unlinkat(folder.number(), entry->d_name, 0);
  }
}

}  // namespace

void KernelCache::make_folder() const {
  make_cache_folder(directory_);
}

bool KernelCache::trusts(const Descriptor& opened, const std::string& path) const {
  const std::string writers = writers_of(opened);
  if (writers.empty()) return true;
  if (foreign_ == Foreign::kAbsent) {
    warn_once("others may write '" + path + "' " + writers +
              "; compiled kernels are not taken from there, so each process compiles its own: chmod -R go-w, or name "
              "another folder by UNIEP_CACHE_DIR");
    return false;
  }
  throw Error(Status::kInvalidArgument,
              "UNIEP_CACHE_DIR: others may write '" + path + "' " + writers +
                  "; compiled kernels are only taken from folders and files of this user or root that nobody else may "
                  "write: chmod -R go-w, or name another folder");
}

Descriptor KernelCache::open_folder() const {
  Descriptor folder(::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return folder && trusts(folder, directory_) ? std::move(folder) : Descriptor();
}

bool KernelCache::load(const std::string& key, std::string& cubin) const {
  if (directory_.empty()) return false;
  const Descriptor folder = open_folder();
  if (!folder) return false;
  const Descriptor file(::openat(folder.number(), name_of(key).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!file || !trusts(file, path(key))) return false;
  FileHeader header{};
  struct stat found {};
  if (!read_all(file.number(), &header, sizeof(header)) || ::fstat(file.number(), &found) != 0) return false;
  const auto size = static_cast<uint64_t>(found.st_size);
  if (size < sizeof(header) || header.size != size - sizeof(header)) return false;
  std::string content(header.size, '\0');
  if (!read_all(file.number(), content.data(), content.size())) return false;
  const FileHeader expected = header_of(key, content);
  if (std::memcmp(&header, &expected, sizeof(header)) != 0) return false;
  cubin = std::move(content);
  if (::time(nullptr) - found.st_mtime > kDay) ::futimens(file.number(), nullptr);  // it is in use
  return true;
}

void KernelCache::store(const std::string& key, const std::string& cubin) const {
  if (directory_.empty()) return;
  make_folder();
  const Descriptor folder = open_folder();
  const std::string aside = name_aside(name_of(key));
  if (!folder || aside.empty()) return;
  const FileHeader header = header_of(key, cubin);
  bool written = false;
  {
    const Descriptor file(
        ::openat(folder.number(), aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
    if (!file) return;
    written = write_all(file.number(), &header, sizeof(header)) && write_all(file.number(), cubin.data(), cubin.size());
  }
  if (!written || ::renameat(folder.number(), aside.c_str(), folder.number(), name_of(key).c_str()) != 0) {
    ::unlinkat(folder.number(), aside.c_str(), 0);
  }
  if (stale_ == Stale::kGo) drop_stale(folder);
}

}  // namespace uniep::cuda
