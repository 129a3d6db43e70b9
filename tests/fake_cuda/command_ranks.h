#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "io/file.h"
#include "support/command.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

// The command line with a process a rank, on a stand-in for the CUDA driver.
namespace uniep::test {

using Arguments = std::vector<std::string>;

struct Ended {
  std::string status, said, printed;
};

inline void expect_said(const Ended& ended, const std::string& text) {
  EXPECT_NE(ended.said.find(text), std::string::npos) << ended.status << ": " << ended.said;
}

// Each rank runs its command in torchrun's environment.
inline std::vector<Process> start_ranks(const TemporaryFolder& folder, const std::vector<Arguments>& arguments,
                                        const std::function<void(std::size_t rank)>& before = {}) {
  static int port = 0;
  ++port;
  std::vector<Process> processes;
  for (std::size_t rank = 0; rank < arguments.size(); ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      io::remove_temporaries_at_signals();  // as the program does
      if (before) before(rank);
      const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
      set("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA);
      set("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA);
      set("UNIEP_CACHE_DIR", (folder / "cache").string());
      set("RANK", std::to_string(rank));
      set("LOCAL_RANK", std::to_string(rank));
      set("WORLD_SIZE", std::to_string(arguments.size()));
      set("MASTER_ADDR", "127.0.0.1");
      set("MASTER_PORT", std::to_string(20000 + ::getppid() % 20000 + port));
      set("UNIEP_ARRIVAL_TIMEOUT_S", "15");
      std::ostringstream said;
      std::cerr.rdbuf(said.rdbuf());
      const CommandResult result = run_command(arguments[rank]);
      const auto line = [&reporter](std::string text) {
        for (char& c : text) c = c == '\n' ? '|' : c;
        reporter.line(text);
      };
      line(std::to_string(result.status));
      line(said.str() + result.err);
      line(result.out);
      std::cerr.rdbuf(nullptr);
    });
  }
  return processes;
}

inline std::vector<Ended> ends_of(std::vector<Process>& processes) {
  std::vector<Ended> ended;
  for (Process& process : processes) {
    const std::string status = process.line(60), said = process.line(60);
    ended.push_back({status, said, process.line(60)});
  }
  return ended;
}

inline std::vector<Ended> run_ranks(const TemporaryFolder& folder, const std::vector<Arguments>& arguments,
                                    const std::function<void(std::size_t rank)>& before = {}) {
  std::vector<Process> processes = start_ranks(folder, arguments, before);
  return ends_of(processes);
}

}  // namespace uniep::test
