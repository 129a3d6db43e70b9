// The page of `uniep tune --report`: whole, with nothing outside of it, and what it says.
#include "cli/tune_report.h"

#include <gtest/gtest.h>

#include "cli/what_if.h"
#include "io/file.h"
#include "support/command.h"
#include "support/environment.h"
#include "support/html_page.h"
#include "support/temporary_folder.h"

namespace uniep::cli {
namespace {

using test::CommandResult;
using test::count;
using test::expect_whole;
using test::run_command;
using test::TemporaryFolder;

LayerOptions small_layer() {
  LayerOptions layer;
  layer.shape = {512, 256, 16, 2};
  layer.ranks = 2;
  layer.tokens_given = {256};
  return layer;
}

TracedCall made_up_call(double factor) {
  TracedCall call{"forward", {}};
  for (int rank = 0; rank < 2; ++rank) {
    int64_t at = 0;
    for (const char* stage : {"dispatch", "fc1", "fc2", "reduce"}) {
      TileEvent event;
      event.rank = rank;
      event.stage = stage;
      event.wait_begin_ns = event.begin_ns = at;
      at += static_cast<int64_t>(100000 * factor);
      event.end_ns = at;
      call.events.push_back(event);
    }
  }
  return call;
}

TunedDirection made_up(const LayerOptions& layer, bool taken) {
  const Machine machine = sim::schedule_machine(sim::shipped_machine("h200"), layer.ranks);
  TunedDirection tuned;
  tuned.entry.key.direction = Direction::kForward;
  for (const char* fields : {"auto", "order.raster=2", "order.raster=4", "queue=static"}) {
    tune::Tried tried;
    tried.schedule = resolve(
        PartialSchedule::parse(fields),
        {.direction = Direction::kForward, .shape = layer.shape, .numerics = layer.numerics, .machine = machine});
    tried.verdict = tune::Verdict::kSlower;
    tuned.search.tried.push_back(tried);
  }
  std::vector<tune::Tried>& tried = tuned.search.tried;
  tried[0].milliseconds = std::vector<double>(12, 2.0);
  tried[1].milliseconds = std::vector<double>(12, 1.5);
  tried[2].milliseconds = {2.5};
  tried[0].ratio = 1, tried[1].ratio = 0.75, tried[2].ratio = 1.25;
  tried[1].ratio_low = 0.74, tried[1].ratio_high = 0.76;
  tried[3].verdict = tune::Verdict::kFailed;
  tried[3].reason = "a <wrong> answer & more";
  tuned.search.best = taken ? 1 : 0;
  tuned.entry.schedule = tried[tuned.search.best].schedule;
  tuned.entry.milliseconds = taken ? 1.5 : 2.0;
  tuned.entry.default_milliseconds = 2.0;
  tuned.default_call = made_up_call(1);
  tuned.chosen_call = made_up_call(0.75);
  return tuned;
}

TEST(TuneReport, SaysWhatWasChosenBesideWhatAndHowSurely) {
  const LayerOptions layer = small_layer();
  const sim::MachineDescription& h200 = sim::shipped_machine("h200");
  const std::string page = tune_report(layer, h200, "NVIDIA H200, 132 workers", {made_up(layer, true)});
  expect_whole(page);
  EXPECT_NE(page.find("Chosen: 1.500 ms beside the default's 2.000 ms, 25.0 % less time."), std::string::npos);
  EXPECT_NE(page.find("0.750 (0.740 to 0.760)"), std::string::npos);
  EXPECT_NE(page.find("1.500 (1.500 to 1.500)"), std::string::npos);
  EXPECT_NE(page.find("failed: a &lt;wrong&gt; answer &amp; more"), std::string::npos);
  // The chosen one first, then the default, then by time; what was not timed last.
  const std::size_t chosen = page.find("<td>order.raster=2</td><td>chosen</td>");
  const std::size_t base = page.find("<td>the default</td>");
  const std::size_t slower = page.find("<td>order.raster=4</td>");
  const std::size_t failed = page.find("<td>queue=static");
  ASSERT_NE(failed, std::string::npos);
  EXPECT_TRUE(chosen < base && base < slower && slower < failed);
  EXPECT_EQ(count(page, "<svg"), 2);
  // This was measured on the machine that is described.
  EXPECT_NE(page.find("<td>measured, chosen"), std::string::npos);
  for (const char* table : {"Other machines", "Other numbers of ranks", "Other numbers of tokens", "Other routing"}) {
    EXPECT_EQ(count(page, std::string("<h3>") + table), 1) << table;
  }
  const std::string stays = tune_report(layer, h200, "cpu avx2, 2 workers", {made_up(layer, false)});
  expect_whole(stays);
  EXPECT_NE(stays.find("The default stays, 2.000 ms"), std::string::npos);
  EXPECT_EQ(stays.find("<td>measured, chosen"), std::string::npos);
}

TEST(TuneReport, WhatIfRowsAreWhatTheSimulatorAndTheSolverSay) {
  const LayerOptions layer = small_layer();
  const sim::MachineDescription& h200 = sim::shipped_machine("h200");
  const WhatIf here = what_if(layer, Direction::kForward, "order.raster=2", h200, "here");
  ASSERT_TRUE(here.default_ms && here.found_ms && here.solved_ms && here.bound_ms) << here.refused;
  EXPECT_LE(*here.solved_ms, *here.default_ms);
  EXPECT_LT(*here.bound_ms, *here.solved_ms);
  const CommandResult simulated = run_command(
      {"simulate", "--shape", "512,256,16,2", "--ranks", "2", "--tokens", "256", "--one-rank", "--json", "-"});
  ASSERT_EQ(simulated.status, 0) << simulated.err;
  EXPECT_NEAR(*here.default_ms, simulated.json()["ms"].get<double>(), 1e-5);

  LayerOptions wide = layer;
  wide.ranks = 16;
  EXPECT_NE(what_if(wide, Direction::kForward, "", h200, "").refused.find("at most 8 ranks"), std::string::npos);
  const WhatIf closed = what_if(wide, Direction::kForward, "", sim::shipped_machine("gb200_nvl72"), "");
  EXPECT_EQ(closed.predicted_by, "closed form");
  EXPECT_TRUE(closed.default_ms && closed.found_ms && closed.solved_ms) << closed.refused;
  wide.ranks = 32;  // 16 experts
  EXPECT_NE(what_if(wide, Direction::kForward, "", sim::shipped_machine("gb200_nvl72"), "").refused, "");
  const WhatIf backward = what_if(layer, Direction::kBackward, "", h200, "");
  ASSERT_TRUE(backward.default_ms && backward.bound_ms && backward.solved_ms) << backward.refused;
  EXPECT_LE(*backward.solved_ms, *backward.default_ms);
  EXPECT_LT(*backward.bound_ms, *backward.solved_ms);
  // Not legal there.
  EXPECT_FALSE(what_if(layer, Direction::kForward, "tile.m=32", h200, "").found_ms);

  const std::vector<WhatIf> skew = what_if_skew(layer, Direction::kForward, "", h200);
  ASSERT_EQ(skew.size(), 4u);
  EXPECT_GT(*skew.back().default_ms, *skew.front().default_ms);
  const std::vector<WhatIf> tokens = what_if_tokens(layer, Direction::kForward, "", h200);
  ASSERT_EQ(tokens.size(), 6u);
  for (std::size_t i = 1; i < tokens.size(); ++i) EXPECT_GT(*tokens[i].default_ms, *tokens[i - 1].default_ms);
  const std::vector<WhatIf> ranks = what_if_ranks(layer, Direction::kForward, "", h200);
  ASSERT_EQ(ranks.size(), 8u);  // 4 and 8 here, 16 to 64 on two wide machines
  EXPECT_EQ(ranks.front().what, "EP 4");
  EXPECT_EQ(ranks.back().what, "EP 64");
  EXPECT_EQ(what_if_machines(layer, Direction::kForward, "", h200).size(), sim::shipped_machine_names().size());
}

TEST(TuneReport, WhatIfKnowsGroupsOfSums) {
  LayerOptions layer = small_layer();
  layer.numerics.combine_groups = 16;  // of an expert each
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const WhatIf here = what_if(layer, direction, "", sim::shipped_machine("h200"), "");
    ASSERT_TRUE(here.default_ms && here.solved_ms && here.bound_ms) << here.refused;
    EXPECT_EQ(here.predicted_by, "simulator");
    EXPECT_LE(*here.solved_ms, *here.default_ms);
    EXPECT_LT(*here.bound_ms, *here.solved_ms);
    LayerOptions wide = layer;
    wide.ranks = 16;
    const WhatIf closed = what_if(wide, direction, "", sim::shipped_machine("gb200_nvl72"), "");
    EXPECT_EQ(closed.predicted_by, "closed form");
    ASSERT_TRUE(closed.default_ms && closed.solved_ms && closed.bound_ms) << closed.refused;
    EXPECT_LE(*closed.solved_ms, *closed.default_ms);
  }
}

TEST(TuneReport, TheCommandWritesIt) {
  const TemporaryFolder folder;
  const test::ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::string file = (folder / "report.html").string();
  const std::vector<std::string> tune = {"tune",      "--engine", "cpu",     "--ranks",      "2",
                                         "--workers", "2",        "--shape", "64,32,8,2",    "--tokens",
                                         "60,33",     "--budget", "1",       "--candidates", "1"};
  const CommandResult result = run_command(test::join(tune, {"--report", file}));
  ASSERT_EQ(result.status, 0) << result.err;
  const std::string page = io::read_text_file(file);
  expect_whole(page);
  EXPECT_EQ(count(page, "<svg"), 4);
  for (const char* part :
       {"<h2>Forward</h2>", "<h2>Backward</h2>", "<td>fc1</td>", "<td>wgrad_fc1</td>", "60", "EP 64"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  const CommandResult refused = run_command(test::join(tune, {"--report", (folder / "no" / "r.html").string()}));
  EXPECT_EQ(refused.status, 1);
  EXPECT_TRUE(refused.one_line_error()) << refused.err;
  EXPECT_NE(refused.err.find("--report"), std::string::npos) << refused.err;
}

}  // namespace
}  // namespace uniep::cli
