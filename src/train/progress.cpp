#include "train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace uniep::train {
namespace {

constexpr int64_t kBarWidth = 24;
constexpr int64_t kLines = 10;  // of a run, where stderr is no terminal
constexpr std::chrono::milliseconds kRedraw(100);

// A log that can not be written ends no training.
void say(const std::string& text) {
  std::fputs(text.c_str(), stderr);
}

}  // namespace

Progress::Progress(std::string name, int64_t first_step, int64_t last_step)
    : name_(std::move(name)), first_step_(first_step), last_step_(last_step), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (line_open_) std::fputc('\n', stderr);
}

std::string Progress::status() const {
  std::string text = fmt::format("step {}/{}  loss {:.4f}", step_.step, last_step_, step_.loss);
  if (terminal_ && held_out_loss_ >= 0) text += fmt::format("  held-out {:.4f}", held_out_loss_);
  return text + fmt::format("  {:.0f} tokens/s", step_.tokens_per_second);
}

void Progress::draw() {
  const int64_t filled = kBarWidth * (step_.step - first_step_) / (last_step_ - first_step_);
  say(fmt::format("\r\033[K{} [{:=<{}}{:<{}}] {}", name_, "", filled, "", kBarWidth - filled, status()));
  std::fflush(stderr);
  last_drawn_ = std::chrono::steady_clock::now();
  line_open_ = true;
}

void Progress::show(const StepRecord& step) {
  step_ = step;
  const int64_t total = last_step_ - first_step_, done = step.step - first_step_;
  if (terminal_) {
    if (!line_open_ || std::chrono::steady_clock::now() - last_drawn_ >= kRedraw) draw();
  } else if (done == 1 || done % std::max<int64_t>(1, total / kLines) == 0 || done == total) {
    say(fmt::format("{}: {}\n", name_, status()));
  }
}

void Progress::show(const EvaluationRecord& evaluation) {
  held_out_loss_ = evaluation.loss;
  if (evaluation.step <= first_step_) return;  // no step to show yet
  if (terminal_) {
    draw();
  } else {
    say(fmt::format("{}: step {}/{}  held-out loss {:.4f}\n", name_, evaluation.step, last_step_, evaluation.loss));
  }
}

}  // namespace uniep::train
