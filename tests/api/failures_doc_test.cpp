#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

// docs/failures.md against the source: each message that the engines and src/comm throw for a failure at run time is
// in it once, and it has no message that nobody throws.
namespace uniep::test {
namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A message with * for each value in it.
std::string with_stars(std::string text, const std::string& values) {
  text = std::regex_replace(text, std::regex(values), "*");
  return std::regex_replace(text, std::regex("\\*+"), "*");
}

// The end of a string literal or a comment that begins at `at`; `at` where none does.
std::size_t end_of_quoted(std::string_view text, std::size_t at) {
  if (text.substr(at, 2) == "//") return std::min(text.find('\n', at), text.size());
  const bool in_number = text[at] == '\'' && at > 0 && std::isalnum(static_cast<unsigned char>(text[at - 1])) != 0;
  if ((text[at] != '"' && text[at] != '\'') || in_number) return at;
  std::size_t end = at + 1;
  while (end < text.size() && text[end] != text[at]) end += text[end] == '\\' ? 2 : 1;
  return std::min(end + 1, text.size());
}

// The literals of a term that is made of literals alone, in std::string() or fmt::format() or not; else "*".
std::string term_text(std::string_view term) {
  const auto trimmed = [&] {
    while (!term.empty() && std::isspace(static_cast<unsigned char>(term.front())) != 0) term.remove_prefix(1);
    while (!term.empty() && std::isspace(static_cast<unsigned char>(term.back())) != 0) term.remove_suffix(1);
  };
  trimmed();
  bool format = false;
  for (const std::string_view call : {std::string_view("std::string("), std::string_view("fmt::format(")}) {
    if (!term.starts_with(call)) continue;
    format = call.starts_with("fmt");
    term.remove_prefix(call.size());
    trimmed();
  }
  if (term.empty() || term.front() != '"') return "*";
  std::string text;
  while (!term.empty() && term.front() == '"') {
    const std::size_t end = end_of_quoted(term, 0);
    text += term.substr(1, end - 2);
    term.remove_prefix(end);
    trimmed();
  }
  text = std::regex_replace(text, std::regex(R"(\\n)"), " ");
  return format ? with_stars(text, "\\{[^}]*\\}") : text;
}

// A text with a * for each term of it that is not made of literals, from `begin` to the end of the call or statement.
std::string message_at(std::string_view code, std::size_t begin) {
  std::string message;
  int depth = 0;
  for (std::size_t i = begin; depth >= 0 && i < code.size(); i = std::max(end_of_quoted(code, i), i + 1)) {
    if (code[i] == '(' || code[i] == '{') ++depth;
    if (code[i] == ')' || code[i] == '}') --depth;
    const bool over = depth < 0 || (depth == 0 && code[i] == ';');
    if (!over && (depth > 0 || code[i] != '+')) continue;
    message += term_text(code.substr(begin, i - begin));
    begin = i + 1;
    if (over) break;
  }
  return with_stars(message, "\\*");
}

struct Thrown {
  std::string status, message, file;
};

const fs::path kRoot = fs::path(UNIEP_TEST_DATA).parent_path().parent_path();

// Without comments, of which some name errors.
std::string code_of(const fs::path& path) {
  const std::string source = text_of(path);
  std::string code;
  for (std::size_t at = 0; at < source.size();) {
    const std::size_t end = std::max(end_of_quoted(source, at), at + 1);
    if (source.compare(at, 2, "//") != 0) code += source.substr(at, end - at);
    at = end;
  }
  return code;
}

// Every Error(status, message) of a source.
void add_errors(const fs::path& path, std::vector<Thrown>& all) {
  static const std::regex kError("\\bError\\((?:Status::(k\\w+)|status|static_cast<Status>\\(\\S+\\)),");
  const std::string code = code_of(path);
  for (std::sregex_iterator found(code.begin(), code.end(), kError), end; found != end; ++found) {
    const auto begin = static_cast<std::size_t>(found->position() + found->length());
    all.push_back({(*found)[1].str(), message_at(code, begin), path.filename().string()});
  }
}

// Every text that a function returns: messages are made of them elsewhere.
void add_returned(const char* file, std::string_view signature, const std::string& status, std::vector<Thrown>& all) {
  const std::string code = code_of(kRoot / file);
  std::size_t at = code.find(signature);
  ASSERT_NE(at, std::string::npos) << file << " has no " << signature;
  const std::size_t end = code.find("\n" + std::string(signature.starts_with(' ') ? "  " : "") + "}", at);
  while ((at = code.find("return ", at)) < end) {
    at += 7;
    const std::string message = message_at(code, at);
    if (message != "*") all.push_back({status, message, fs::path(file).filename().string()});
  }
}

// Made of texts that are looked at where they are returned.
const std::set<std::string> kComposed = {"*", "*; *", "rank *: *", "*; recover() makes the group usable again"};

std::vector<Thrown> all_thrown() {
  std::vector<Thrown> all;
  for (const char* folder : {"src/engine", "src/comm"}) {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      const std::string extension = entry.path().extension();
      if (extension == ".cpp" || extension == ".h") add_errors(entry.path(), all);
    }
  }
  add_errors(kRoot / "src/model/placement_errors.h", all);
  add_errors(kRoot / "src/api/check_call.h", all);
  add_returned("src/engine/cuda/memory/signals.cpp", "std::string describe(", "kTimeout", all);
  add_returned("src/comm/mesh_join.cpp", "  std::string fault_of(", "kInvalidArgument", all);
  return all;
}

// kInvalidArgument is a check of arguments, but where it says that ranks do not agree.
bool of_run_time(const Thrown& thrown) {
  static const std::set<std::string> kAgreements = {"rank_mesh.cpp", "mesh_join.cpp", "process_memory.cpp",
                                                    "device_placement.cpp"};
  if (kComposed.contains(thrown.message)) return false;
  if (thrown.status != "kInvalidArgument") return true;
  return kAgreements.contains(thrown.file) &&
         (thrown.message.find("rank *") != std::string::npos || thrown.message.starts_with('*'));
}

// Messages are the code in the first cell of tables, with <...> for values.
std::vector<std::string> documented() {
  const std::string text = text_of(kRoot / "docs/failures.md");
  static const std::regex kRow("\n\\| `([^`]+)` \\|");
  std::vector<std::string> messages;
  for (std::sregex_iterator row(text.begin(), text.end(), kRow), end; row != end; ++row) {
    messages.push_back(with_stars((*row)[1].str(), "<[^>]*>"));
  }
  return messages;
}

bool fits(const std::string& message, const std::string& pattern) {
  static const std::regex kSpecial("[.^$|()\\[\\]{}+?\\\\]");
  const std::string escaped = std::regex_replace(pattern, kSpecial, "\\$&");
  return std::regex_match(message, std::regex(std::regex_replace(escaped, std::regex("\\*"), ".*")));
}

TEST(FailuresPage, HasEachMessageOfTheSourceOnce) {
  const std::vector<std::string> messages = documented();
  int64_t required = 0;
  for (const Thrown& thrown : all_thrown()) {
    if (!of_run_time(thrown)) continue;
    ++required;
    int64_t count = std::count(messages.begin(), messages.end(), thrown.message);
    if (count == 0) {
      count = std::count_if(messages.begin(), messages.end(),
                            [&](const std::string& message) { return fits(message, thrown.message); });
    }
    EXPECT_EQ(count, 1) << thrown.file << ", " << thrown.status << ": " << thrown.message;
  }
  EXPECT_GT(required, 50);
}

TEST(FailuresPage, HasNoMessageThatTheSourceHasNot) {
  const std::vector<Thrown> all = all_thrown();
  const std::vector<std::string> messages = documented();
  EXPECT_GT(messages.size(), 50u);
  for (const std::string& message : messages) {
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [&](const Thrown& thrown) {
      return thrown.message == message || (!kComposed.contains(thrown.message) && fits(message, thrown.message));
    })) << message;
  }
  for (const std::string& composed : kComposed) {
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [&](const Thrown& thrown) { return thrown.message == composed; }))
        << composed;
  }
}

TEST(FailuresPage, TheReaderOfSourcesSeesMessages) {
  EXPECT_EQ(message_at("std::string(\"a \") + std::to_string(f(1 + 2)) + \" b\" \"c\");", 0), "a * bc");
  EXPECT_EQ(message_at("fmt::format(\"{}: {:.2f} s\", x, \"no\"));", 0), "*: * s");
  EXPECT_EQ(message_at("who + \" left; (x)\";", 0), "* left; (x)");
  EXPECT_TRUE(fits("rank * (it) left", "*(it) left"));
  EXPECT_FALSE(fits("rank * (it) stayed", "*(it) left"));
}

}  // namespace
}  // namespace uniep::test
