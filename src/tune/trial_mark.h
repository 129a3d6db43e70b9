#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "io/file.h"
#include "uniep/schedule.h"

namespace uniep::tune {

// What the processes of a search are trying, on disk: FILE.trying<N> beside the search's journal is process N's. A
// process that somebody ends by SIGHUP, SIGINT or SIGTERM takes its file along. One that crashes or is killed leaves
// it, and what stands in it counts as what has ended the program. So a Schedule is forgiven where all of them took
// their files along: torchrun's SIGTERM to the others does not hide that one has crashed.
class TrialMark {
 public:
  // Without a name nothing is marked.
  TrialMark(const std::filesystem::path& journal, int process, int processes);

  // Whether each of the processes has its file.
  bool all_are_there() const;
  // Somebody has ended another one of the processes: what fails now is no fault of what is tried.
  bool another_has_left() const;

  void begin(const Schedule& schedule);
  void end();   // of what was begun
  void drop();  // this process marks nothing any more
  bool marks() const { return removed_.has_value(); }

 private:
  bool is_there(int process) const;
  void write(const std::string& text);

  std::filesystem::path journal_;
  int process_ = 0, processes_ = 1;
  std::optional<io::RemovedAtSignals> removed_;  // none: nothing is marked
};

// Of a search that has ended: Schedules as text that were under way in a process that left its file.
std::vector<std::string> left_behind(const std::filesystem::path& journal);
void forget_marks(const std::filesystem::path& journal);
// The journal whose process has this file; empty where it is no such file.
std::filesystem::path journal_of_mark(const std::filesystem::path& file);

}  // namespace uniep::tune
