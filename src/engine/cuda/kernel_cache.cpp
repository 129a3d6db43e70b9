#include "engine/cuda/kernel_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "engine/cuda/embedded_sources.h"

namespace uniep::cuda {
namespace {

namespace fs = std::filesystem;

// FNV-1a, from two different starts: 128 bits of key.
uint64_t hash_text(std::string_view text, uint64_t hash) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

constexpr uint64_t kHashStart = 0xcbf29ce484222325ull;
constexpr uint64_t kOtherStart = 0x84222325cbf29ce4ull;

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

std::string default_directory() {
  if (const char* given = std::getenv("UNIEP_CACHE_DIR")) return given;
  if (const char* base = std::getenv("XDG_CACHE_HOME"); base != nullptr && base[0] == '/') {
    return std::string(base) + "/uniep";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && home[0] == '/') {
    return std::string(home) + "/.cache/uniep";
  }
  return {};
}

}  // namespace

std::string cache_key(const KernelRequest& request) {
  // All sources count, so that a changed header can not be missed.
  static const std::pair<uint64_t, uint64_t> sources = [] {
    std::pair<uint64_t, uint64_t> hashes{kHashStart, kOtherStart};
    for (const EmbeddedSource& source : embedded_sources()) {
      for (const std::string_view text : {std::string_view(source.name), std::string_view(source.text)}) {
        hashes.first = hash_text(std::string_view("\0", 1), hash_text(text, hashes.first));
        hashes.second = hash_text(std::string_view("\0", 1), hash_text(text, hashes.second));
      }
    }
    return hashes;
  }();
  std::string text = "nvrtc " + compiler_version() + " " + request.description();
  for (const std::string& option : common_options()) text += " " + option;
  text += request.text;
  char name[40];
  std::snprintf(name, sizeof(name), "%016llx%016llx", static_cast<unsigned long long>(hash_text(text, sources.first)),
                static_cast<unsigned long long>(hash_text(text, sources.second)));
  return name;
}

KernelCache::KernelCache() : directory_(default_directory()) {}

std::string KernelCache::path(const std::string& key) const {
  return directory_ + "/" + key + ".cubin";
}

bool KernelCache::load(const std::string& key, std::string& cubin) const {
  if (directory_.empty()) return false;
  std::ifstream file(path(key), std::ios::binary);
  FileHeader header{};
  if (!file.read(reinterpret_cast<char*>(&header), sizeof(header))) return false;
  std::error_code error;
  const auto size = fs::file_size(path(key), error);
  if (error || size < sizeof(header) || header.size != size - sizeof(header)) return false;
  std::string content(header.size, '\0');
  if (!file.read(content.data(), static_cast<std::streamsize>(content.size()))) return false;
  const FileHeader expected = header_of(key, content);
  if (std::memcmp(&header, &expected, sizeof(header)) != 0) return false;
  cubin = std::move(content);
  return true;
}

void KernelCache::store(const std::string& key, const std::string& cubin) const {
  if (directory_.empty()) return;
  static std::atomic<unsigned> counter{0};
  std::error_code error;
  fs::create_directories(directory_, error);
  const std::string aside = path(key) + "." + std::to_string(getpid()) + "." + std::to_string(counter++) + ".new";
  const FileHeader header = header_of(key, cubin);
  {
    std::ofstream file(aside, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&header), sizeof(header));
    file.write(cubin.data(), static_cast<std::streamsize>(cubin.size()));
    file.flush();
    if (!file) {
      file.close();
      fs::remove(aside, error);
      return;
    }
  }
  fs::rename(aside, path(key), error);
  if (error) fs::remove(aside, error);
}

}  // namespace uniep::cuda
