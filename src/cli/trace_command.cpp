#include "cli/trace_command.h"

#include <memory>
#include <string>

#include "cli/trace_file.h"
#include "cli/trace_svg.h"
#include "io/file.h"

namespace uniep::cli {
namespace {

struct TraceOptions {
  std::string file;
  std::string svg;
};

int run_trace(const TraceOptions& options) {
  io::write_file(options.svg, trace_svg(parse_trace(io::read_text_file(options.file), options.file)));
  return 0;
}

}  // namespace

void add_trace_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command = app.add_subcommand("trace", "Draw a timeline that `uniep run --trace` wrote");
  const auto options = std::make_shared<TraceOptions>();
  command->add_option("file", options->file, "timeline (Perfetto JSON)")->type_name("FILE")->required();
  command->add_option("--svg", options->svg, "picture to write")->type_name("OUT")->required();
  command->callback([options, &action] { action = [options] { return run_trace(*options); }; });
}

}  // namespace uniep::cli
