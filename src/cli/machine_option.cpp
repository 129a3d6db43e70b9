#include "cli/machine_option.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "cli/options.h"
#include "io/file.h"
#include "io/quote.h"

namespace uniep::cli {

void add_machine_option(CLI::App& app, std::string& name, const std::string& by_default) {
  app.add_option("--machine", name,
                 fmt::format("machine description: {}, or a file (default {})",
                             fmt::join(sim::shipped_machine_names(), ", "), by_default.empty() ? name : by_default))
      ->type_name("NAME|FILE");
}

sim::MachineDescription load_machine(const std::string& name, const std::string& option) {
  const std::vector<std::string> shipped = sim::shipped_machine_names();
  if (std::find(shipped.begin(), shipped.end(), name) != shipped.end()) return sim::shipped_machine(name);
  return naming_option(option, [&] {
    std::error_code no_matter;
    if (!std::filesystem::exists(name, no_matter)) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("{} is neither a file nor one of {}", io::quote_path(name), fmt::join(shipped, ", ")));
    }
    return sim::parse_machine(io::read_text_file(name), name);
  });
}

}  // namespace uniep::cli
