#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace uniep::train {

// The text to train on. Of each file the last tenth is held out; the rests are joined, and so are the tails.
struct Text {
  std::vector<std::string> files;
  std::vector<uint8_t> training;
  std::vector<uint8_t> held_out;
  uint64_t hash = 0;  // of all files' bytes, in order

  // Throws Error(kInvalidArgument) when there is not one window of sequence + 1 bytes on either side.
  void check_window(int64_t sequence) const;
  // The window that sequence `index` of step `step` trains on: sequence + 1 bytes from a place that a hash of (seed,
  // step, index) picks.
  const uint8_t* training_window(int64_t sequence, uint64_t seed, int64_t step, int64_t index) const;
  // Window `index` of `count`, spread evenly over the held-out text.
  const uint8_t* held_out_window(int64_t sequence, int64_t index, int64_t count) const;
};

// Throws Error(kInvalidArgument) that names the file that is missing, no regular file or empty.
Text load_text(const std::vector<std::filesystem::path>& files);

// The licence texts that every Debian system has, sorted by name. Throws Error(kInvalidArgument) where there are none.
std::vector<std::filesystem::path> default_text_files();

}  // namespace uniep::train
