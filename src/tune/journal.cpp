#include "tune/journal.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "io/cache_folder.h"
#include "io/file.h"
#include "tune/trial_mark.h"
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
  if (!std::filesystem::is_regular_file(file, ignored)) return {};
  try {
    return parse_journal(io::read_text_file(file));
  } catch (const Error&) {
    return {};
  }
}

// What was under way in a program that has ended has ended it. Whether there was any.
bool end_untried(std::vector<JournalLine>& lines) {
  bool any = false;
  for (JournalLine& line : lines) {
    if (line.verdict != Verdict::kUntried) continue;
    line = {Verdict::kFailed, line.schedule, kEnded};
    any = true;
  }
  return any;
}

std::filesystem::path numbered_file(std::filesystem::path file, int number) {
  if (number > 0) file += std::to_string(number);
  return file;
}

// Adds what processes have left under way. Whether there was any.
bool add_left_behind(std::vector<JournalLine>& lines, const std::filesystem::path& file) {
  bool any = false;
  for (const std::string& schedule : left_behind(file)) {
    const bool known = std::any_of(lines.begin(), lines.end(), [&](const JournalLine& line) {
      return line.schedule == schedule && is_final(line);
    });
    if (known) continue;
    std::erase_if(lines, [&](const JournalLine& line) { return line.schedule == schedule; });
    lines.push_back({Verdict::kFailed, schedule, kEnded});
    any = true;
  }
  return any;
}

// The journals of one layer that are there, also those of which there are marks alone.
std::set<std::filesystem::path> journals_of(const std::filesystem::path& file) {
  const std::string name = file.filename().string();
  std::set<std::filesystem::path> found;
  std::error_code error;
  std::filesystem::directory_iterator entry(file.parent_path(), error);
  while (!error && entry != std::filesystem::directory_iterator()) {
    const std::filesystem::path of_mark = journal_of_mark(entry->path());
    const std::filesystem::path journal = of_mark.empty() ? entry->path() : of_mark;
    const std::string other = journal.filename().string();
    if (other.starts_with(name) && other.find_first_not_of("0123456789", name.size()) == std::string::npos) {
      found.insert(journal);
    }
    entry.increment(error);
  }
  return found;
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

Journal::Journal(const std::filesystem::path& file, int number) {
  constexpr int kNumbers = 64;
  if (file.empty()) return;
  make_cache_folder(file.parent_path());
  for (int tried = 0; tried < kNumbers && !owner_; ++tried) {
    file_ = numbered_file(file, number + tried);
    owner_ = io::FileOwner::take(file_);
  }
  if (!owner_) file_.clear();
  read(file);
}

Journal Journal::look(const std::filesystem::path& file) {
  Journal journal;
  if (!file.empty()) journal.read(file);
  return journal;
}

void Journal::read(const std::filesystem::path& file) {
  for (const std::filesystem::path& other : journals_of(file)) {
    const bool lives = other != file_ && io::FileOwner::has_owner(other);
    std::vector<JournalLine> lines = read_journal(other);
    const bool untried = !lives && end_untried(lines);
    const bool left = !lives && add_left_behind(lines, other);
    if (other == file_) {
      lines_ = std::move(lines);
      // From now on this search counts as alive, and its marks are its own.
      if (!(untried || left) || try_to_write()) forget_marks(other);
      continue;
    }
    std::copy_if(lines.begin(), lines.end(), std::back_inserter(others_), is_final);
  }
}

void Journal::forget(const std::filesystem::path& file) noexcept {
  try {
    std::error_code ignored;
    for (const std::filesystem::path& one : journals_of(file)) {
      if (io::FileOwner::has_owner(one)) continue;
      std::filesystem::remove(one, ignored);
      forget_marks(one);
    }
  } catch (const std::exception&) {  // no memory
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

void Journal::forget_slower() noexcept {
  std::erase_if(lines_, [](const JournalLine& line) { return !is_final(line); });
}

void Journal::finish() {
  if (file_.empty()) return;
  forget_slower();
  std::error_code ignored;
  if (lines_.empty()) {
    std::filesystem::remove(file_, ignored);
    return;
  }
  write();
}

bool Journal::try_to_write() const {
  try {
    write();
    return true;
  } catch (const Error&) {  // a search that has something to note will say so
    return false;
  }
}

void Journal::write() const {
  io::write_file(file_, to_text(lines_));
}

}  // namespace uniep::tune
