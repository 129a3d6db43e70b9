#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tune/search.h"

namespace uniep::tune {

struct JournalLine {
  Verdict verdict = Verdict::kUntried;
  std::string schedule, reason;
  bool operator==(const JournalLine&) const = default;
};

// The lines of such a file; those that make no sense are left out.
std::vector<JournalLine> parse_journal(std::string_view text);
std::string to_text(const std::vector<JournalLine>& lines);

// What a search has found so far, on disk, a line a step: so that one that was ended goes on where it was, and a
// Schedule that ended the program is not tried again. Failed and wrong Schedules stay in it for good.
class Journal {
 public:
  // Without a file name nothing is kept. A file that can not be read, or lines that make no sense, count as absent.
  // What was noted before it was tried, and nothing after, ended the program: it has failed. `others`: journals of the
  // same layer that others write; what failed or was wrong there is known here.
  explicit Journal(std::filesystem::path file, const std::vector<std::filesystem::path>& others = {});

  // Verdicts that are known: failed and wrong ones, and those that an unfinished search left behind.
  void mark(std::vector<Tried>& schedules) const;
  bool is_out(const Schedule& schedule) const;  // failed or wrong
  // Before a Schedule is tried (kUntried), and once its verdict is known. Throws Error(kIo).
  void note(const Tried& tried);
  // The search is over: what was slower may be tried again next time. Throws Error(kIo).
  void finish();

 private:
  void write() const;
  JournalLine* find(const std::string& schedule);

  std::filesystem::path file_;
  std::vector<JournalLine> lines_;   // one a Schedule
  std::vector<JournalLine> others_;  // failed and wrong ones of others
};

}  // namespace uniep::tune
