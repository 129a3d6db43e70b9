#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "cli/options.h"
#include "io/file.h"

namespace uniep::cli {

// A file that is opened before the work, so that a path that can not be written is noticed at once.
class OutputFile {
 public:
  OutputFile(const std::string& option, const std::string& path) : option_(option) {
    if (!path.empty()) naming_option(option_, [&] { file_.emplace(path); });
  }
  void write(std::string_view text) {
    naming_option(option_, [&] {
      file_->write(text);
      file_->commit();
    });
  }

 private:
  std::string option_;
  std::optional<io::AtomicFile> file_;
};

}  // namespace uniep::cli
