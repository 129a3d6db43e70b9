#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <clocale>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "support/disturb.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/random_layer.h"
#include "support/temporary_folder.h"

// Which limits of time a Group takes: of its options and of the environment.
namespace uniep::test {
namespace {

struct Limit {
  const char* name;
  const char* variable;
  double GroupOptions::*option;
};

const Limit kLimits[] = {
    {"timeout_seconds", "UNIEP_TIMEOUT_S", &GroupOptions::timeout_seconds},
    {"arrival_timeout_seconds", "UNIEP_ARRIVAL_TIMEOUT_S", &GroupOptions::arrival_timeout_seconds},
};

// Says nothing, and whether it fails nobody asks.
void run_quietly(std::vector<std::string> command) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  std::vector<char*> words;
  for (std::string& word : command) words.push_back(word.data());
  words.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::execvp(words.front(), words.data());
    ::_exit(127);
  }
  ::waitpid(child, nullptr, 0);
  testing::internal::GetCapturedStdout();
  testing::internal::GetCapturedStderr();
}

GroupOptions options_with(const Limit& limit, double seconds) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 2;
  options.workers = 2;
  options.*limit.option = seconds;
  return options;
}

TEST(TimeoutLimits, OthersAreRefused) {
  constexpr double kEndless = std::numeric_limits<double>::infinity();
  for (const Limit& limit : kLimits) {
    const ScopedVariable none(limit.variable, std::nullopt);
    for (const auto& [seconds, text] :
         std::initializer_list<std::pair<double, const char*>>{{-1, "-1"},
                                                               {1e10, "10000000000"},
                                                               {1'000'001, "1000001"},
                                                               {kEndless, "inf"},
                                                               {-kEndless, "-inf"},
                                                               {std::numeric_limits<double>::quiet_NaN(), "nan"}}) {
      expect_error(Status::kInvalidArgument,
                   std::string(limit.name) + ": " + text + "; must be above 0 and at most 1000000 seconds",
                   [&, value = seconds] { const Group group(options_with(limit, value)); });
    }
  }
}

TEST(TimeoutLimits, OtherVariablesAreRefused) {
  for (const Limit& limit : kLimits) {
    for (const char* text : {"-1", "0", "1e10", "1000001", "inf", "nan", "soon", "60 s"}) {
      const ScopedVariable variable(limit.variable, text);
      expect_error(Status::kInvalidArgument,
                   std::string(limit.variable) + ": '" + text + "'; must be above 0 and at most 1000000 seconds",
                   [&] { const Group group(options_with(limit, 0)); });
      const Group given(options_with(limit, 60));  // goes before the variable
    }
  }
}

TEST(TimeoutLimits, VariablesAreReadAlikeInEveryLocale) {
  const auto takes = [](const char* text) {
    const ScopedVariable variable("UNIEP_TIMEOUT_S", text);
    const Group group(options_with(kLimits[0], 0));
  };
  const auto all_are_taken = [&] {
    for (const char* text : {"60", "1.5", ".5", "+2.5", " \t7", "1e3", "2.5E-1", "0x10", "0X1.8p3", "+0x.8"}) {
      EXPECT_NO_THROW(takes(text)) << text;
    }
    for (const char* text : {"1,5", "+", "0x", "+-5", "- 5", "1.5 ", "0x1g", " ", "1e999", "1e-999", "1.5.5"}) {
      expect_error(Status::kInvalidArgument, std::string("UNIEP_TIMEOUT_S: '") + text + "'; must be",
                   [&] { takes(text); });
    }
  };
  all_are_taken();
  // One whose numbers have a comma. localedef warns of all that it lacks, and says that it failed.
  const TemporaryFolder folder;
  const std::string source = (folder / "comma").string(), made = (folder / "xx_XX").string();
  std::ofstream(source) << "LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \"\"\ngrouping -1\nEND LC_NUMERIC\n";
  run_quietly({"localedef", "-c", "-i", source, "-f", "ANSI_X3.4-1968", made});
  const ScopedVariable place("LOCPATH", folder.path().string());
  const std::string before = std::setlocale(LC_NUMERIC, nullptr);
  if (std::setlocale(LC_NUMERIC, "xx_XX") == nullptr) GTEST_SKIP() << "no localedef here";
  EXPECT_EQ(std::strtod("1,5", nullptr), 1.5);
  all_are_taken();
  std::setlocale(LC_NUMERIC, before.c_str());
}

TEST(TimeoutLimits, TheLargestIsNoTimeOutAtOnce) {
  const RandomLayer layer = random_layer(4, {.ranks = {2}, .fewest_tokens = 8});
  const cli::LayerResult expected = run_sequential(layer);
  for (const Limit& limit : kLimits) {
    const auto run = [&](const GroupOptions& options) {
      Group group(options);
      disturb(group, {.delayed_rank = 1, .delay_microseconds = 200});  // the other one waits
      const auto schedule = [&](Direction direction) {
        return resolve({}, {.direction = direction,
                            .shape = layer.config.shape,
                            .numerics = layer.config.numerics,
                            .machine = group.machine()});
      };
      return difference(
          run_layer(group, layer.config, layer.data, schedule(Direction::kForward), schedule(Direction::kBackward)),
          expected);
    };
    GroupOptions options = options_with(limit, kMaxTimeoutSeconds);
    EXPECT_EQ(run(options), "");
    const ScopedVariable variable(limit.variable, "1000000");
    options.*limit.option = 0;
    EXPECT_EQ(run(options), "");
  }
}

}  // namespace
}  // namespace uniep::test
