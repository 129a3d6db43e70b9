#include "tune/journal.h"

#include <algorithm>
#include <optional>
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

std::vector<JournalLine> parse_journal(std::string_view text) {
  std::vector<JournalLine> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::size_t first = line.find('\t');
    const std::size_t second = first == std::string::npos ? first : line.find('\t', first + 1);
    if (second == std::string::npos) continue;
    const std::optional<Verdict> verdict = verdict_of(std::string_view(line).substr(0, first));
    if (verdict) lines.push_back({*verdict, line.substr(first + 1, second - first - 1), line.substr(second + 1)});
  }
  return lines;
}

std::string to_text(const std::vector<JournalLine>& lines) {
  std::string text;
  for (const JournalLine& line : lines) {
    text += std::string(verdict_name(line.verdict)) + "\t" + line.schedule + "\t" + line.reason + "\n";
  }
  return text;
}

Journal::Journal(std::filesystem::path file) : file_(std::move(file)) {
  std::error_code ignored;
  if (file_.empty() || !std::filesystem::exists(file_, ignored)) return;
  std::string text;
  try {
    text = io::read_text_file(file_);
  } catch (const Error&) {
    return;
  }
  lines_ = parse_journal(text);
}

JournalLine* Journal::find(const std::string& schedule) {
  const auto found =
      std::find_if(lines_.begin(), lines_.end(), [&](const JournalLine& line) { return line.schedule == schedule; });
  return found == lines_.end() ? nullptr : &*found;
}

void Journal::mark(std::vector<Tried>& schedules) const {
  for (Tried& tried : schedules) {
    const std::string text = to_text(tried.schedule);
    for (const JournalLine& line : lines_) {
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
  JournalLine line{tried.verdict, text, tried.reason};
  std::replace_if(
      line.reason.begin(), line.reason.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
  if (JournalLine* const known = find(text)) {
    *known = std::move(line);
  } else {
    lines_.push_back(std::move(line));
  }
  write();
}

void Journal::finish() {
  if (file_.empty()) return;
  std::erase_if(lines_, [](const JournalLine& line) {
    return line.verdict != Verdict::kFailed && line.verdict != Verdict::kWrong;
  });
  std::error_code ignored;
  if (lines_.empty()) {
    std::filesystem::remove(file_, ignored);
    return;
  }
  write();
}

void Journal::write() const {
  std::error_code ignored;
  std::filesystem::create_directories(file_.parent_path(), ignored);
  io::write_file(file_, to_text(lines_));
}

}  // namespace uniep::tune
