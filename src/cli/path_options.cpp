#include "cli/path_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cli/options.h"
#include "io/quote.h"

namespace uniep::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOutputs[] = {"--checkpoint", "--export", "--json", "--out",
                                         "--raw",        "--report", "--svg",  "--trace"};

struct GivenPath {
  std::string option, text;
  fs::path file;
  bool output;
};

bool holds(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// An option says by its placeholder that it takes a path.
bool takes_path(std::string_view placeholder) {
  return holds(placeholder, "FILE") || holds(placeholder, "FOLDER");
}

// Pipes and devices may be written twice.
bool is_replaced(const fs::path& path) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  return !fs::exists(status) || fs::is_regular_file(status);
}

std::vector<GivenPath> given_paths(const CLI::App& command) {
  std::vector<GivenPath> given;
  for (const CLI::Option* option : command.get_options()) {
    const std::string placeholder = option->get_type_name();
    if (option->count() == 0 || !takes_path(placeholder)) continue;
    const std::string name = option->get_name();
    const bool output = std::find(std::begin(kOutputs), std::end(kOutputs), name) != std::end(kOutputs);
    for (const std::string& text : option->results()) {
      if (text.empty() && !holds(placeholder, "key=value")) refuse_value(name, text, "a path");
      if ((name == "--json" && text == "-") || !is_replaced(text)) continue;
      std::error_code error;
      const fs::path file = fs::weakly_canonical(fs::absolute(text, error), error);
      if (!error) given.push_back({name, text, file, output});
    }
  }
  return given;
}

}  // namespace

void check_paths(const CLI::App& command) {
  const std::vector<GivenPath> given = given_paths(command);
  for (const GivenPath& written : given) {
    if (!written.output) continue;
    for (const GivenPath& other : given) {
      if (&other == &written || other.file != written.file) continue;
      if (written.option == "--checkpoint" && other.option == "--resume") continue;
      throw Error(Status::kInvalidArgument,
                  fmt::format("{}: {} is the file of {}, too, and would be replaced; must be another one",
                              written.option, io::quote_path(written.text), other.option));
    }
  }
}

}  // namespace uniep::cli
