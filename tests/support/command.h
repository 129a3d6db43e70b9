#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/command_line.h"

namespace uniep::test {

// What one call of the command line gave.
struct CommandResult {
  int status = -1;
  std::string out, err;

  nlohmann::json json() const { return nlohmann::json::parse(out); }
  // A failure says why in exactly one line.
  bool one_line_error() const {
    return err.size() > 1 && err.back() == '\n' && std::count(err.begin(), err.end(), '\n') == 1;
  }
};

inline CommandResult run_command(std::vector<std::string> arguments) {
  std::ostringstream out, err;
  CommandResult result;
  result.status = cli::run_cli(std::move(arguments), out, err);
  result.out = out.str();
  result.err = err.str();
  return result;
}

inline std::vector<std::string> join(std::vector<std::string> first, const std::vector<std::string>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Fails with this status and one line on standard error, which has each of these names.
inline void expect_failure(const std::vector<std::string>& arguments, int status,
                           const std::vector<std::string>& named) {
  const CommandResult result = run_command(arguments);
  std::string line;
  for (const std::string& argument : arguments) line += " " + argument;
  EXPECT_EQ(result.status, status) << line << "\n" << result.err;
  EXPECT_TRUE(result.one_line_error()) << line << "\n" << result.err;
  EXPECT_EQ(result.out, "") << line;
  for (const std::string& name : named) {
    EXPECT_NE(result.err.find(name), std::string::npos) << line << "\n" << result.err << "does not name " << name;
  }
}

}  // namespace uniep::test
