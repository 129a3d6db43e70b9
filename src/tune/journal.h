#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tune/search.h"

namespace uniep::tune {

// What a search has found so far, on disk, a line a step: so that one that was ended goes on where it was, and a
// Schedule that ended the program is not tried again. Failed and wrong Schedules stay in it for good.
class Journal {
 public:
  // Without a file name nothing is kept. A file that can not be read, or lines that make no sense, count as absent.
  explicit Journal(std::filesystem::path file);

  // Verdicts that are known: failed and wrong ones, and those that an unfinished search left behind.
  void mark(std::vector<Tried>& schedules) const;
  // Before a Schedule is tried (kUntried), and once its verdict is known. Throws Error(kIo).
  void note(const Tried& tried);
  // The search is over: what was slower may be tried again next time. Throws Error(kIo).
  void finish();

 private:
  struct Line {
    Verdict verdict;
    std::string schedule, reason;
  };
  void write() const;
  Line* find(const std::string& schedule);

  std::filesystem::path file_;
  std::vector<Line> lines_;  // one a Schedule
};

}  // namespace uniep::tune
