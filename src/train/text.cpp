#include "train/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "io/file.h"
#include "io/hash64.h"
#include "io/quote.h"
#include "model/refuse.h"

namespace uniep::train {
namespace {

constexpr int64_t kHeldOutPart = 10;  // one in so many bytes

}  // namespace

void Text::check_window(int64_t sequence) const {
  const auto least = static_cast<std::size_t>(sequence) + 1;
  if (training.size() >= least && held_out.size() >= least) return;
  refuse(
      fmt::format("--text: {} bytes to train on and {} held out (a tenth of each file); --sequence {} needs {} of each",
                  training.size(), held_out.size(), sequence, least));
}

const uint8_t* Text::training_window(int64_t sequence, uint64_t seed, int64_t step, int64_t index) const {
  uint64_t place = io::avalanche64(seed + io::kGolden64);
  place = io::avalanche64(place + static_cast<uint64_t>(step));
  place = io::avalanche64(place + static_cast<uint64_t>(index));
  const uint64_t places = training.size() - static_cast<uint64_t>(sequence);
  return training.data() + static_cast<uint64_t>((static_cast<unsigned __int128>(place) * places) >> 64);
}

const uint8_t* Text::held_out_window(int64_t sequence, int64_t index, int64_t count) const {
  const int64_t last = static_cast<int64_t>(held_out.size()) - sequence - 1;
  return held_out.data() + (count > 1 ? last * index / (count - 1) : 0);
}

Text load_text(const std::vector<std::filesystem::path>& files) {
  Text text;
  for (const std::filesystem::path& file : files) {
    const std::string name = io::quote_path(file.native());
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(file, error);
    if (!std::filesystem::exists(status)) refuse("--text: the file " + name + " does not exist");
    if (std::filesystem::is_directory(status)) refuse("--text: " + name + " is a folder; name the files in it");
    const std::vector<std::byte> bytes = io::read_file(file);
    if (bytes.empty()) refuse("--text: the file " + name + " is empty");
    const auto size = static_cast<int64_t>(bytes.size());
    const auto* begin = reinterpret_cast<const uint8_t*>(bytes.data());
    const int64_t kept = size - size / kHeldOutPart;
    text.training.insert(text.training.end(), begin, begin + kept);
    text.held_out.insert(text.held_out.end(), begin + kept, begin + size);
    text.hash = io::avalanche64(text.hash + static_cast<uint64_t>(size));
    for (const std::byte byte : bytes) text.hash = io::avalanche64(text.hash + static_cast<uint64_t>(byte));
    text.files.push_back(file.string());
  }
  return text;
}

std::vector<std::filesystem::path> default_text_files() {
  const std::filesystem::path folder = "/usr/share/common-licenses";
  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    std::error_code ignored;
    if (entry.is_symlink(ignored) || !entry.is_regular_file(ignored)) continue;
    files.push_back(entry.path());
  }
  if (files.empty()) {
    refuse("--text: not given, and " + folder.string() +
           ", the default text, has no files; name one text file or more");
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace uniep::train
