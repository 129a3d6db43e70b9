#pragma once

#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cli/options.h"
#include "io/file.h"
#include "uniep/error.h"

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

// A file that is written again and again while work goes on, which no full disk ends: the first failure is a line, and
// the last try.
class KeptFile {
 public:
  KeptFile(std::string path, std::function<void(const std::string& line)> say)
      : path_(std::move(path)), say_(std::move(say)) {}
  void keep(std::string_view text) {
    if (failed_) return;
    try {
      io::write_file(path_, text);
    } catch (const Error& error) {
      failed_ = true;
      say_(std::string("warning: ") + error.what() + "; it is not written again until the end");
    }
  }

 private:
  std::string path_;
  std::function<void(const std::string& line)> say_;
  bool failed_ = false;
};

// A report where --json says: "" is a table on standard output, "-" JSON there, else JSON in the file, which was opened
// before.
inline void write_report(const std::string& where, OutputFile& file, const std::string& json,
                         const std::string& table) {
  if (where.empty() || where == "-") {
    std::cout << (where.empty() ? table : json);
  } else {
    file.write(json);
  }
}

}  // namespace uniep::cli
