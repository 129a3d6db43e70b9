#include "cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <iostream>
#include <new>
#include <stdexcept>

#include "cli/bench_command.h"
#include "cli/calibrate_command.h"
#include "cli/compile_command.h"
#include "cli/info_command.h"
#include "cli/path_options.h"
#include "cli/run_command.h"
#include "cli/schedule_command.h"
#include "cli/simulate_command.h"
#include "cli/solve_command.h"
#include "cli/trace_command.h"
#include "cli/train_command.h"
#include "cli/tune_command.h"
#include "io/quote.h"
#include "uniep/error.h"
#include "uniep/version.h"

namespace uniep::cli {
namespace {

constexpr int kFailure = 1;

// Lends std::cout another stream's buffer.
class StandardOutput {
 public:
  explicit StandardOutput(std::ostream& stream) : state_(std::cout.rdstate()), own_(std::cout.rdbuf(stream.rdbuf())) {}
  ~StandardOutput() {
    std::cout.rdbuf(own_);
    std::cout.clear(state_);
  }
  StandardOutput(const StandardOutput&) = delete;
  StandardOutput& operator=(const StandardOutput&) = delete;

 private:
  std::ios_base::iostate state_;
  std::streambuf* own_;
};

// A message may quote what a library or a file says: whatever it is, it stays on one line.
std::string one_line(std::string_view text) {
  std::string line(text);
  while (!line.empty() && line.back() == '\n') line.pop_back();
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  return line;
}

bool is_bad_usage(Status status) {
  return status == Status::kInvalidArgument || status == Status::kUnsupported;
}

// `uniep` alone, `uniep help` and `uniep help COMMAND` as --help takes them.
void ask_for_help(std::vector<std::string>& arguments) {
  if (arguments.empty()) arguments = {"--help"};
  if (arguments.front() != "help") return;
  arguments.erase(arguments.begin());
  arguments.emplace_back("--help");
}

void require_command(const CLI::App& app, const std::vector<std::string>& arguments) {
  std::string names;
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    if (arguments.front() == command->get_name()) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  if (arguments.front().starts_with('-')) return;
  throw Error(Status::kInvalidArgument, io::quote_text(arguments.front()) + " is no command; must be one of " + names);
}

// Where to look after a command line that is no sentence.
std::string usage_hint(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  return chosen.empty() ? "; see uniep --help" : "; see uniep " + chosen.front()->get_name() + " --help";
}

void flush_output() {
  std::cout.flush();
  if (!std::cout) throw Error(Status::kIo, "standard output: can not be written (closed, or its device is full)");
}

}  // namespace

int run_cli(std::vector<std::string> arguments, std::ostream& out, std::ostream& err, const std::string& program) {
  const StandardOutput lent(out);
  CLI::App app("Expert-parallel mixture-of-experts layers as persistent megakernels.", "uniep");
  app.set_version_flag("--version", "uniep " UNIEP_VERSION_STRING);
  app.require_subcommand(1);

  const auto fail = [&](int status, std::string_view message) {
    const std::vector<CLI::App*> commands = app.get_subcommands();
    err << (commands.empty() ? "uniep" : "uniep " + commands.front()->get_name()) << ": " << one_line(message) << '\n';
    err.flush();
    return status;
  };
  try {
    std::function<int()> action;
    add_run_command(app, action, {program, arguments});
    add_schedule_command(app, action);
    add_simulate_command(app, action);
    add_solve_command(app, action);
    add_info_command(app, action);
    add_compile_command(app, action);
    add_bench_command(app, action, {program, arguments});
    add_tune_command(app, action, {program, arguments});
    add_calibrate_command(app, action);
    add_trace_command(app, action);
    add_train_command(app, action);
    ask_for_help(arguments);
    require_command(app, arguments);
    std::reverse(arguments.begin(), arguments.end());  // the order in which CLI11 takes a vector
    int status = 0;
    try {
      app.parse(arguments);
      check_paths(*app.get_subcommands().front());
      status = action();
    } catch (const CLI::CallForHelp&) {
      std::cout << app.help();
    } catch (const CLI::CallForVersion&) {
      std::cout << app.version() << '\n';
    }
    flush_output();
    return status;
  } catch (const CLI::ParseError& error) {
    return fail(kBadUsage, error.what() + usage_hint(app));
  } catch (const Error& error) {
    return fail(is_bad_usage(error.status()) ? kBadUsage : kFailure, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kFailure, "out of memory: the tensors of this shape do not fit; ask for fewer tokens or experts");
  } catch (const std::exception& error) {
    return fail(kFailure, error.what());
  } catch (...) {
    return fail(kFailure, "unknown failure");
  }
}

}  // namespace uniep::cli
