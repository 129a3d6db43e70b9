#include "tune/journal.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "io/file.h"
#include "uniep/error.h"

namespace uniep::tune {
namespace {

const char* const kEnded = "the program ended while this was tried";

std::optional<Verdict> verdict_of(std::string_view name) {
  for (const Verdict verdict :
       {Verdict::kUntried, Verdict::kInTheRunning, Verdict::kSlower, Verdict::kFailed, Verdict::kWrong}) {
    if (name == verdict_name(verdict)) return verdict;
  }
  return std::nullopt;
}

}  // namespace

Journal::Journal(std::filesystem::path file) : file_(std::move(file)) {
  std::error_code ignored;
  if (file_.empty() || !std::filesystem::exists(file_, ignored)) return;
  std::string text;
  try {
    text = io::read_text_file(file_);
  } catch (const Error&) {
    return;
  }
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t first = line.find('\t');
    const std::size_t second = first == std::string::npos ? first : line.find('\t', first + 1);
    if (second == std::string::npos) continue;
    const std::optional<Verdict> verdict = verdict_of(std::string_view(line).substr(0, first));
    if (verdict) lines_.push_back({*verdict, line.substr(first + 1, second - first - 1), line.substr(second + 1)});
  }
}

Journal::Line* Journal::find(const std::string& schedule) {
  const auto found =
      std::find_if(lines_.begin(), lines_.end(), [&](const Line& line) { return line.schedule == schedule; });
  return found == lines_.end() ? nullptr : &*found;
}

void Journal::mark(std::vector<Tried>& schedules) const {
  for (Tried& tried : schedules) {
    const std::string text = to_text(tried.schedule);
    for (const Line& line : lines_) {
      if (line.schedule != text || line.verdict == Verdict::kInTheRunning) continue;
      const bool ended = line.verdict == Verdict::kUntried;  // noted before it was tried, and nothing after
      tried.verdict = ended ? Verdict::kFailed : line.verdict;
      tried.reason = ended ? kEnded : line.reason;
    }
  }
}

void Journal::note(const Tried& tried) {
  if (file_.empty()) return;
  const std::string text = to_text(tried.schedule);
  Line line{tried.verdict, text, tried.reason};
  std::replace_if(
      line.reason.begin(), line.reason.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
  if (Line* const known = find(text)) {
    *known = std::move(line);
  } else {
    lines_.push_back(std::move(line));
  }
  write();
}

void Journal::finish() {
  if (file_.empty()) return;
  std::erase_if(lines_,
                [](const Line& line) { return line.verdict != Verdict::kFailed && line.verdict != Verdict::kWrong; });
  std::error_code ignored;
  if (lines_.empty()) {
    std::filesystem::remove(file_, ignored);
    return;
  }
  write();
}

void Journal::write() const {
  std::string text;
  for (const Line& line : lines_) {
    text += std::string(verdict_name(line.verdict)) + "\t" + line.schedule + "\t" + line.reason + "\n";
  }
  std::error_code ignored;
  std::filesystem::create_directories(file_.parent_path(), ignored);
  io::write_file(file_, text);
}

}  // namespace uniep::tune
