#include "cli/trace_command.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <utility>

#include "cli/options.h"
#include "cli/trace_file.h"
#include "cli/trace_svg.h"
#include "io/file.h"

namespace uniep::cli {
namespace {

constexpr int kMostShownWorkers = 1024;

struct TraceOptions {
  std::string file;
  std::string svg;
  int workers = 0;  // of each rank; 0: all
};

int run_trace(const TraceOptions& options) {
  Trace trace = parse_trace(io::read_text_file(options.file), options.file);
  if (options.workers > 0) trace = with_fewer_workers(std::move(trace), options.workers);
  io::write_file(options.svg, trace_svg(trace));
  return 0;
}

}  // namespace

void add_trace_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command =
      app.add_subcommand("trace", "Draw a timeline that `uniep run --trace` or `uniep bench --trace` wrote");
  const auto options = std::make_shared<TraceOptions>();
  command->add_option("file", options->file, "timeline (Perfetto JSON)")->type_name("FILE")->required();
  command->add_option("--svg", options->svg, "picture to write")->type_name("FILE.svg")->required();
  add_integer_option(*command, "--workers", options->workers, {0, kMostShownWorkers},
                     {"N", "draw N workers of every rank, evenly spread; 0: all"});
  command->callback([options, &action] { action = [options] { return run_trace(*options); }; });
}

}  // namespace uniep::cli
