#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/file_owner.h"
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
// A search of several processes, or one that its user may end, marks what it tries beside it (tune/trial_mark.h).
// Searches for one layer at the same time, of a job's groups or of several jobs, have a file each: FILE, FILE1, FILE2,
// ... What failed or was wrong is known from all of them.
class Journal {
 public:
  // Takes the file of that number, or the next one that no living search has. Without a file name nothing is kept. A
  // file that can not be read, or lines that make no sense, count as absent. What was noted before it was tried, and
  // nothing after, ended the program, and so did what is still marked: it has failed, unless that program runs.
  explicit Journal(const std::filesystem::path& file, int number = 0);
  // Only looks: it takes no file, and note() and finish() do nothing.
  static Journal look(const std::filesystem::path& file);

  // Deletes the files that no living search has.
  static void forget(const std::filesystem::path& file) noexcept;

  // Where this one is kept; empty: nowhere.
  const std::filesystem::path& file() const { return file_; }

  // Verdicts that are known: failed and wrong ones, and those that an unfinished search left behind.
  void mark(std::vector<Tried>& schedules) const;
  bool is_out(const Schedule& schedule) const;  // failed or wrong
  // Before a Schedule is tried (kUntried), and once its verdict is known. Throws Error(kIo).
  void note(const Tried& tried);
  // The search is over: what was slower may be tried again next time. Throws Error(kIo).
  void finish();
  // The same in memory alone.
  void forget_slower() noexcept;

 private:
  Journal() = default;
  void read(const std::filesystem::path& file);
  void write() const;
  bool try_to_write() const;
  JournalLine* find(const std::string& schedule);

  std::filesystem::path file_;
  std::optional<io::FileOwner> owner_;
  std::vector<JournalLine> lines_;   // one a Schedule
  std::vector<JournalLine> others_;  // failed and wrong ones of others
};

}  // namespace uniep::tune
