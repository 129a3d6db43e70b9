#pragma once

#include <string>
#include <vector>

namespace uniep::cli {

// How a program is started.
struct Command {
  std::string program;  // a path
  std::vector<std::string> arguments;
};

// Runs a program once for each of `ranks` ranks on this machine, in the environment that torchrun gives
// (comm/bootstrap.h), and waits for all of them. They share this process's standard output; what they write to
// standard error comes line by line, the last one when all have ended well. When one fails the others are ended, and
// Error says which one and what it wrote last, as "`name`: message" without the name: kInvalidArgument after exit
// status 2, else kDevice.
void launch_ranks(const Command& command, const std::string& name, int ranks);

}  // namespace uniep::cli
