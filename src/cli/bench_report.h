#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cli/bench_operation.h"

namespace uniep::cli {

nlohmann::ordered_json to_json(const BenchRequest& request, const std::string& operation, const BenchReport& report);
std::string to_table(const BenchRequest& request, const std::string& operation, const BenchReport& report);

}  // namespace uniep::cli
