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

bool is_final(const JournalLine& line) {
  return line.verdict == Verdict::kFailed || line.verdict == Verdict::kWrong;
}

std::vector<JournalLine> read_journal(const std::filesystem::path& file) {
  std::error_code ignored;
  if (file.empty() || !std::filesystem::exists(file, ignored)) return {};
  std::vector<JournalLine> lines;
  try {
    lines = parse_journal(io::read_text_file(file));
  } catch (const Error&) {
    return {};
  }
  for (JournalLine& line : lines) {
    if (line.verdict == Verdict::kUntried) line = {Verdict::kFailed, line.schedule, kEnded};
  }
  return lines;
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

Journal::Journal(std::filesystem::path file, const std::vector<std::filesystem::path>& others)
    : file_(std::move(file)), lines_(read_journal(file_)) {
  for (const std::filesystem::path& other : others) {
    for (JournalLine& line : read_journal(other)) {
      if (is_final(line)) others_.push_back(std::move(line));
    }
  }
}

JournalLine* Journal::find(const std::string& schedule) {
  const auto found =
      std::find_if(lines_.begin(), lines_.end(), [&](const JournalLine& line) { return line.schedule == schedule; });
  return found == lines_.end() ? nullptr : &*found;
}

void Journal::mark(std::vector<Tried>& schedules) const {
  for (Tried& tried : schedules) {
    const std::string text = to_text(tried.schedule);
    for (const std::vector<JournalLine>* lines : {&lines_, &others_}) {
      for (const JournalLine& line : *lines) {
        if (line.schedule != text || !(is_final(line) || line.verdict == Verdict::kSlower)) continue;
        tried.verdict = line.verdict;
        tried.reason = line.reason;
      }
    }
  }
}

bool Journal::is_out(const Schedule& schedule) const {
  std::vector<Tried> one = {{.schedule = schedule}};
  mark(one);
  return one[0].verdict == Verdict::kFailed || one[0].verdict == Verdict::kWrong;
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
  std::erase_if(lines_, [](const JournalLine& line) { return !is_final(line); });
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
