#include "tune/calibrated_machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "io/cache_folder.h"
#include "io/file.h"
#include "io/quote.h"
#include "uniep/error.h"

namespace uniep::tune {

std::filesystem::path calibrated_file(const std::string& device) {
  const std::string folder = cache_folder();
  if (folder.empty()) return {};
  std::string name;
  for (const char c : device.substr(0, 100)) {
    name += std::isalnum(static_cast<unsigned char>(c)) ? static_cast<char>(std::tolower(c)) : '_';
  }
  return std::filesystem::path(folder) / "machines" / (name + ".json");
}

std::optional<sim::MachineDescription> find_calibrated(const std::string& device, std::string& problem) {
  const std::filesystem::path file = calibrated_file(device);
  std::error_code no_matter;
  if (file.empty() || !std::filesystem::is_regular_file(file, no_matter)) return std::nullopt;
  try {
    sim::MachineDescription machine = sim::parse_machine(io::read_text_file(file), file.string());
    if (!machine.calibrated) {
      problem = fmt::format("{} is not what uniep calibrate wrote", io::quote_path(file.string()));
    } else if (machine.calibrated->device != device) {
      problem = fmt::format("{} is of {}, not of {}", io::quote_path(file.string()),
                            io::quote_text(machine.calibrated->device), io::quote_text(device));
    } else if (!machine.calibrated->doubtful.empty()) {
      problem = fmt::format("{} disagrees with itself on {}", io::quote_path(file.string()),
                            fmt::join(machine.calibrated->doubtful, ", "));
    } else {
      return machine;
    }
  } catch (const Error& error) {
    problem = error.what();
  }
  return std::nullopt;
}

std::optional<sim::MachineDescription> find_calibrated_among(std::string_view words, std::string& problem) {
  constexpr std::string_view kBetween = ", ";
  for (;;) {
    const std::size_t end = std::min(words.find(kBetween), words.size());
    std::optional<sim::MachineDescription> found = find_calibrated(std::string(words.substr(0, end)), problem);
    if (found || !problem.empty() || end == words.size()) return found;
    words.remove_prefix(end + kBetween.size());
  }
}

}  // namespace uniep::tune
