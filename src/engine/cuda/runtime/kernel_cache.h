#pragma once

#include <string>

#include "engine/cuda/runtime/run_time_compiler.h"
#include "io/descriptor.h"

namespace uniep::cuda {

// Identifies a compiled kernel: all embedded sources, the options, the target, the compiler's version and its file's
// name and size, in which builds of one version differ.
std::string cache_key(const KernelRequest& request);

// Eight hexadecimal digits of the embedded sources.
std::string sources_label();

// Compiled kernels on disk, one file each, in cache_folder(). An empty UNIEP_CACHE_DIR turns it off. Files appear whole
// (written aside, then renamed), so processes may share a directory; a file that is short, damaged or of another format
// counts as absent and is written anew. A directory that can not be written, or a full disk, makes kernels compile
// again, nothing worse. In cache_folder() store() deletes kernels that nobody has loaded for 90 days, and what ended
// processes have left half-written; in a folder that is named nothing. A folder or a file that another user but root
// owns, or may write, is refused by load() and store(): Error(kInvalidArgument). Where nobody has named the folder (no
// UNIEP_CACHE_DIR, as with a home that users share) it counts as absent, with one line on stderr a process.
class KernelCache {
 public:
  enum class Stale { kStay, kGo };

  KernelCache();
  explicit KernelCache(std::string directory, Stale stale = Stale::kStay)
      : directory_(std::move(directory)), stale_(stale) {}

  bool load(const std::string& key, std::string& cubin) const;
  void store(const std::string& key, const std::string& cubin) const;
  std::string path(const std::string& key) const;
  void make_folder() const;  // best effort
  const std::string& directory() const { return directory_; }

 private:
  enum class Foreign { kRefused, kAbsent };  // what others may write

  // Throws, or is false, by foreign_.
  bool trusts(const Descriptor& opened, const std::string& path) const;
  Descriptor open_folder() const;  // none where there is none that is trusted

  std::string directory_;
  Stale stale_;
  Foreign foreign_ = Foreign::kRefused;
};

}  // namespace uniep::cuda
