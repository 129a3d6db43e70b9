#include "cli/options.h"

#include <CLI/CLI.hpp>

namespace uniep::cli {

CLI::Option* add_text_option(CLI::App& app, const std::string& name, std::function<void(const std::string&)> take,
                             const std::string& placeholder, const std::string& description) {
  const auto callback = [take = std::move(take)](const CLI::results_t& texts) {
    take(texts.at(0));
    return true;
  };
  CLI::Option* option = app.add_option(name, callback, description);
  return option->type_name(placeholder)->type_size(1);
}

}  // namespace uniep::cli
