#pragma once

#include <chrono>
#include <string>

#include "train/trainer.h"

namespace uniep::train {

// Shows on stderr how a run goes: a bar that is redrawn on a terminal, else a line every few steps.
class Progress {
 public:
  Progress(std::string name, int64_t first_step, int64_t last_step);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const StepRecord& step);
  void show(const EvaluationRecord& evaluation);

 private:
  std::string status() const;
  void draw();

  std::string name_;
  int64_t first_step_;  // the step before the first
  int64_t last_step_;
  bool terminal_;
  bool line_open_ = false;
  StepRecord step_;            // the last one shown
  double held_out_loss_ = -1;  // of the last evaluation; negative: none yet
  std::chrono::steady_clock::time_point last_drawn_;
};

}  // namespace uniep::train
