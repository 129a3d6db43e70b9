#include "tune/trial_mark.h"

#include <string_view>
#include <system_error>

#include "uniep/error.h"

namespace uniep::tune {
namespace {

const char* const kMark = ".trying";

std::filesystem::path mark_of(std::filesystem::path journal, int process) {
  journal += kMark + std::to_string(process);
  return journal;
}

std::vector<std::filesystem::path> marks_of(const std::filesystem::path& journal) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  std::filesystem::directory_iterator entry(journal.parent_path(), error);
  while (!error && entry != std::filesystem::directory_iterator()) {
    if (journal_of_mark(entry->path()) == journal) found.push_back(entry->path());
    entry.increment(error);
  }
  return found;
}

}  // namespace

TrialMark::TrialMark(const std::filesystem::path& journal, int process, int processes)
    : journal_(journal), process_(process), processes_(processes) {
  if (journal_.empty()) return;
  removed_.emplace(mark_of(journal_, process_));
  write("");
}

bool TrialMark::is_there(int process) const {
  std::error_code ignored;
  return std::filesystem::exists(mark_of(journal_, process), ignored);
}

bool TrialMark::all_are_there() const {
  if (!marks()) return false;
  for (int process = 0; process < processes_; ++process) {
    if (!is_there(process)) return false;
  }
  return true;
}

bool TrialMark::another_has_left() const {
  if (!marks()) return false;
  for (int process = 0; process < processes_; ++process) {
    if (process != process_ && !is_there(process)) return true;
  }
  return false;
}

void TrialMark::begin(const Schedule& schedule) {
  write(to_text(schedule));
}

void TrialMark::end() {
  write("");
}

void TrialMark::drop() {
  if (!marks()) return;
  removed_.reset();
  std::error_code ignored;
  std::filesystem::remove(mark_of(journal_, process_), ignored);
}

void TrialMark::write(const std::string& text) {
  if (!marks()) return;
  try {
    io::write_file(mark_of(journal_, process_), text);
  } catch (const Error&) {  // what it says would be of another Schedule
    drop();
  }
}

std::vector<std::string> left_behind(const std::filesystem::path& journal) {
  std::vector<std::string> schedules;
  for (const std::filesystem::path& mark : marks_of(journal)) {
    try {
      const std::string text = io::read_text_file(mark);
      if (!text.empty() && text.find_first_of("\t\n") == std::string::npos) schedules.push_back(text);
    } catch (const Error&) {
    }
  }
  return schedules;
}

void forget_marks(const std::filesystem::path& journal) {
  std::error_code ignored;
  for (const std::filesystem::path& mark : marks_of(journal)) std::filesystem::remove(mark, ignored);
}

std::filesystem::path journal_of_mark(const std::filesystem::path& file) {
  const std::string name = file.filename().string();
  const std::size_t mark = name.rfind(kMark);
  if (mark == std::string::npos) return {};
  const std::size_t number = mark + std::string_view(kMark).size();
  if (number == name.size() || name.find_first_not_of("0123456789", number) != std::string::npos) return {};
  return file.parent_path() / name.substr(0, mark);
}

}  // namespace uniep::tune
