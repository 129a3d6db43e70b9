#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "sim/machine.h"

namespace uniep::cli {

// Where `uniep calibrate` keeps the description of a GPU of this name; empty where nothing is kept.
std::filesystem::path calibrated_file(const std::string& device);

// What is kept there, for auto. None where there is none, and where it is damaged, another GPU's, or disagrees with
// itself: `problem` then has one line.
std::optional<sim::MachineDescription> find_calibrated(const std::string& device, std::string& problem);

}  // namespace uniep::cli
