#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/parser_forward.h"
#include "uniep/error.h"

// Options of the command line whose values are checked as they are read, so that every message names the option, its
// value and what is legal.
namespace uniep::cli {

// What is wrong with the value of an option: "--name: 'value'; must be legal". Error(kInvalidArgument).
[[noreturn]] void refuse_value(std::string_view option, std::string_view value, std::string_view legal);

// What `work` throws, with the option's name in front.
template <typename Work>
auto naming_option(const std::string& option, Work&& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw Error(error.status(), option + ": " + error.what());
  }
}

// A whole number from minimum to maximum.
int64_t parse_integer(std::string_view option, std::string_view text, int64_t minimum, int64_t maximum);
uint64_t parse_unsigned(std::string_view option, std::string_view text, uint64_t minimum);
// Several, separated by commas.
std::vector<int64_t> parse_integers(std::string_view option, std::string_view text, int64_t minimum, int64_t maximum);

// An option whose value goes through `take`.
CLI::Option* add_text_option(CLI::App& app, const std::string& name, std::function<void(const std::string&)> take,
                             const std::string& placeholder, const std::string& description);

// A whole number of a range into `value`, whose present value is the default.
struct IntegerRange {
  int64_t minimum, maximum;
};
struct OptionHelp {
  std::string placeholder, description;
};
template <typename Integer>
CLI::Option* add_integer_option(CLI::App& app, const std::string& name, Integer& value, IntegerRange range,
                                const OptionHelp& help) {
  return add_text_option(
      app, name,
      [&value, name, range](const std::string& text) {
        value = static_cast<Integer>(parse_integer(name, text, range.minimum, range.maximum));
      },
      help.placeholder, help.description + " (default " + std::to_string(value) + ")");
}

// One of a few words into `value`.
template <typename Enum>
CLI::Option* add_word_option(CLI::App& app, const std::string& name, Enum& value,
                             const std::vector<std::pair<std::string, Enum>>& words, const std::string& description) {
  std::string legal;
  for (const auto& [word, meaning] : words) legal += (legal.empty() ? "" : "|") + word;
  return add_text_option(
      app, name,
      [&value, name, words, legal](const std::string& text) {
        for (const auto& [word, meaning] : words) {
          if (word == text) {
            value = meaning;
            return;
          }
        }
        refuse_value(name, text, legal);
      },
      legal, description);
}

}  // namespace uniep::cli
