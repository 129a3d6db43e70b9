#include "cli/compile_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/layer_options.h"
#include "cli/options.h"
#include "cli/output_file.h"
#include "io/json_text.h"
#include "uniep/compile.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxThreads = 1024;

struct CompileOptions {
  LayerOptions layer;
  std::vector<Operation> operations = CompileRequest{}.operations;
  std::string folder;
  int threads = 0;
  std::string json;
};

int run_compile(const CompileOptions& options) {
  const LayerOptions& layer = options.layer;
  if (layer.engine == EngineKind::kCpu) refuse_value("--engine", "cpu", "cuda, whose kernels are compiled");
  OutputFile json_file("--json", options.json == "-" ? "" : options.json);
  CompileRequest request;
  request.layer = layer.config();
  request.ranks = layer.ranks;
  if (layer.workers > 0) request.workers = layer.workers;
  request.forward = layer.given(Direction::kForward);
  request.backward = layer.given(Direction::kBackward);
  request.operations = options.operations;
  const std::vector<KernelFile> kernels = compile_kernels(request, options.folder, options.threads);
  const auto compiled =
      std::count_if(kernels.begin(), kernels.end(), [](const KernelFile& kernel) { return !kernel.was_there; });
  Json json;
  json["folder"] = options.folder;
  json["compiled"] = compiled;
  json["kernels"] = Json::array();
  std::string table;
  for (const KernelFile& kernel : kernels) {
    json["kernels"].push_back(
        {{"name", kernel.name}, {"file", kernel.path}, {"was_there", kernel.was_there}, {"seconds", kernel.seconds}});
    table += kernel.was_there ? fmt::format("{:>10}  {}\n", "was there", kernel.name)
                              : fmt::format("{:>8.1f} s  {}\n", kernel.seconds, kernel.name);
  }
  table += fmt::format("{} kernels in {}, {} of them compiled now; jobs read them with UNIEP_CACHE_DIR={}\n",
                       kernels.size(), options.folder, compiled, options.folder);
  write_report(options.json, json_file, io::json_text(json, 2) + "\n", table);
  return 0;
}

}  // namespace

void add_compile_command(CLI::App& app, std::function<int()>& action) {
  CLI::App* command =
      app.add_subcommand("compile", "Compile a layer's GPU kernels before a job, with or without a GPU");
  const auto options = std::make_shared<CompileOptions>();
  add_layer_options(*command, options->layer);
  add_text_option(
      *command, "--op",
      [options](const std::string& text) {
        const std::vector<std::pair<std::string, Operation>> words = {
            {"layer", Operation::kLayer}, {"dispatch", Operation::kDispatch}, {"combine", Operation::kCombine}};
        const auto found =
            std::find_if(words.begin(), words.end(), [&](const auto& word) { return word.first == text; });
        if (found == words.end()) refuse_value("--op", text, "layer|dispatch|combine");
        options->operations = {found->second};
      },
      "layer|dispatch|combine", "what the job calls (default: all three)");
  command->add_option("--out", options->folder, "where the kernels are kept; made if it is not there")
      ->type_name("FOLDER")
      ->required();
  add_integer_option(*command, "--threads", options->threads, {0, kMaxThreads},
                     {"N", "kernels compiled at once; 0: one a processor"});
  command->add_option("--json", options->json, "report as JSON; -: on standard output")->type_name("FILE|-");
  command->callback([options, &action] { action = [options] { return run_compile(*options); }; });
}

}  // namespace uniep::cli
