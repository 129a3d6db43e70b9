#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "sim/machine.h"

namespace uniep::tune {

// Where `uniep calibrate` keeps the description of a GPU of this name; empty where nothing is kept.
std::filesystem::path calibrated_file(const std::string& device);

// What is kept there, for auto. None where there is none, and where it is damaged, another GPU's, or disagrees with
// itself: `problem` then has one line.
std::optional<sim::MachineDescription> find_calibrated(const std::string& device, std::string& problem);
// The same for a list of words, "NAME, launch, version", one of which is a device.
std::optional<sim::MachineDescription> find_calibrated_among(std::string_view words, std::string& problem);

}  // namespace uniep::tune
