#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <iostream>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "io/file.h"

namespace {

// A standard stream that the caller closed becomes one that refuses writing: otherwise the next file that is opened
// would take its number, and messages would end up in that file.
void occupy_standard_streams() {
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) != -1) continue;
    const int replacement = open("/dev/null", O_RDONLY);  // the lowest free number: this one
    if (replacement != descriptor) _exit(1);
  }
}

}  // namespace

int main(int count, char** values) {
  occupy_standard_streams();
  std::signal(SIGPIPE, SIG_IGN);  // a reader that has gone is a failed write,
  std::signal(SIGXFSZ, SIG_IGN);  // and so is a file that may not grow
  uniep::io::remove_temporaries_at_signals();
  return uniep::cli::run_cli(std::vector<std::string>(values + std::min(count, 1), values + count), std::cout,
                             std::cerr, "/proc/self/exe");
}
