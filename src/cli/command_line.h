#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace uniep::cli {

inline constexpr int kBadUsage = 2;  // exit status

// The whole program: runs the command that the arguments (without the program's name) ask for and returns its exit
// status: 0; 1 = failure; 2 = bad usage or input. A failure is one line on `err`. Commands print on std::cout, which is
// `out` meanwhile, so only one call may run at a time. `program` is the path of a program that does the same with the
// same arguments, for a process a rank; without it only torchrun can start them.
int run_cli(std::vector<std::string> arguments, std::ostream& out, std::ostream& err, const std::string& program = "");

}  // namespace uniep::cli
