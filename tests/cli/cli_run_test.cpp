#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "cli/layer_runner.h"
#include "io/checksum.h"
#include "io/file.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "io/safetensors_writer.h"
#include "io/synthetic.h"
#include "support/command.h"
#include "support/temporary_folder.h"
#include "uniep/uniep.h"

namespace uniep::test {
namespace {

using Json = nlohmann::json;
using Arguments = std::vector<std::string>;

const Arguments kSmall = {"run",       "--engine",  "cpu",      "--hidden", "40", "--intermediate", "24", "--experts",
                          "8",         "--topk",    "3",        "--ranks",  "4",  "--workers",      "2",  "--tokens",
                          "13,0,29,6", "--routing", "zipf:0.7", "--seed",   "11"};

Json run_json(const Arguments& more) {
  const CommandResult result = run_command(join(join(kSmall, more), {"--json", "-"}));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return result.json();
}

std::set<std::string> keys_of(const Json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

TEST(Run, TheDefaultsRunAndPrintATable) {
  const CommandResult result = run_command({"run"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (const char* name : {"engine", "shape", "tokens", "schedule", "forward", "TFLOP/s", "checksum"}) {
    EXPECT_NE(result.out.find(name), std::string::npos) << name;
  }
}

TEST(Run, JsonHasTheKeysOfTheContract) {
  const Json json = run_json({"--backward", "--check", "--repeat", "3", "--wgrad", "fp32"});
  EXPECT_EQ(keys_of(json),
            (std::set<std::string>{"engine", "ranks", "shape", "tokens", "numerics", "schedule", "schedule_backward",
                                   "forward_ms", "backward_ms", "tflops", "rows_per_rank", "bytes_moved", "checksum",
                                   "check", "check_sampled"}));
  EXPECT_EQ(json["engine"], "cpu");
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["shape"], Json::parse(R"({"hidden": 40, "intermediate": 24, "experts": 8, "topk": 3})"));
  EXPECT_EQ(json["tokens"], Json::parse("[13, 0, 29, 6]"));
  EXPECT_EQ(json["numerics"]["weight_gradient"], "fp32");
  EXPECT_EQ(json["forward_ms"]["all"].size(), 3u);
  EXPECT_EQ(json["backward_ms"]["all"].size(), 3u);
  EXPECT_EQ(keys_of(json["checksum"]), (std::set<std::string>{"y", "z", "dx", "dprobs", "dw1", "dw2"}));
  EXPECT_EQ(keys_of(json["check"]), keys_of(json["checksum"]));
  for (const auto& [name, check] : json["check"].items()) {
    EXPECT_EQ(keys_of(check), (std::set<std::string>{"error", "worst_row", "limit", "worst_row_limit", "passed"}));
    EXPECT_TRUE(check["passed"]) << name;
    EXPECT_LT(check["error"], 8e-3) << name;
  }
  EXPECT_EQ(json["check_sampled"], false);

  int64_t rows = 0;
  for (const Json& own : json["rows_per_rank"]) rows += own.get<int64_t>();
  EXPECT_EQ(rows, (13 + 0 + 29 + 6) * 3);
  const double all_ms = json["forward_ms"]["median"];
  const double expected = 6.0 * 40 * 24 * json["rows_per_rank"][0].get<double>() / (all_ms * 1e-3) / 1e12;
  EXPECT_NEAR(json["tflops"]["forward"][0], expected, expected * 1e-9);
}

TEST(Run, TheMedianIsTheMiddleOfAll) {
  for (const char* repeat : {"3", "4"}) {
    const Json times = run_json({"--repeat", repeat})["forward_ms"];
    std::vector<double> all = times["all"];
    std::sort(all.begin(), all.end());
    const double median = all.size() % 2 == 1 ? all[1] : (all[1] + all[2]) / 2;
    EXPECT_DOUBLE_EQ(times["median"], median);
  }
}

TEST(Run, WithoutBackwardThereIsOnlyForward) {
  const Json json = run_json({});
  EXPECT_EQ(keys_of(json["checksum"]), (std::set<std::string>{"y", "z"}));
  EXPECT_TRUE(json["schedule_backward"].is_null());
  EXPECT_TRUE(json["backward_ms"].is_null());
  EXPECT_TRUE(json["tflops"]["backward"].is_null());
  EXPECT_TRUE(json["check"].is_null());
}

TEST(Run, OneGlobalBatchGivesTheSameBitsOnAnyNumberOfRanks) {
  const Arguments layer = {"run",       "--engine", "cpu",    "--hidden", "64",         "--intermediate", "72",
                           "--experts", "8",        "--topk", "2",        "--backward", "--wgrad",        "main_grad"};
  const std::map<std::string, std::string> tokens_of = {{"1", "48"}, {"2", "20,28"}, {"4", "12"}, {"8", "6"}};
  Json first;
  for (const auto& [ranks, tokens] : tokens_of) {
    const CommandResult result =
        run_command(join(layer, {"--ranks", ranks, "--tokens", tokens, "--check", "--json", "-"}));
    ASSERT_EQ(result.status, 0) << result.err;
    const Json json = result.json();
    if (first.is_null()) first = json;
    EXPECT_EQ(json["checksum"], first["checksum"]) << ranks << " ranks";
  }
}

TEST(Run, SchedulesAndDisturbancesChangeNoBit) {
  const Json plain = run_json({"--backward"});
  for (const char* schedule :
       {"fusion=none", "fusion=pairs,dispatch.transport=push", "combine.transport=staged",
        "queue=dynamic,dispatch.dedup=off,tile.n=64", "fusion=layer,order.interleave=mixed,queue=dynamic"}) {
    for (const char* seed : {"77", "78"}) {  // of clusters of one and of two
      const Json other = run_json({"--backward", "--shuffle", seed, "--schedule", schedule});
      EXPECT_EQ(other["checksum"], plain["checksum"]) << schedule << " shuffle " << seed;
    }
  }
}

TEST(Run, TheSeedDecidesTheData) {
  EXPECT_NE(run_json({})["checksum"], run_json({"--combine-groups", "4"})["checksum"]);
  const CommandResult other = run_command(Arguments{"run", "--json", "-", "--seed", "2"});
  const CommandResult same = run_command(Arguments{"run", "--json", "-", "--seed", "1"});
  const CommandResult plain = run_command(Arguments{"run", "--json", "-"});
  EXPECT_EQ(same.json()["checksum"], plain.json()["checksum"]);
  EXPECT_NE(other.json()["checksum"], plain.json()["checksum"]);
}

TEST(Run, ScheduleBackwardOverridesFields) {
  const Json json = run_json({"--backward", "--schedule", "fusion=none,tile.n=64", "--schedule-backward",
                              "fusion=layer,backward.wgrad=after"});
  EXPECT_EQ(json["schedule"]["fusion"], "none");
  EXPECT_EQ(json["schedule"]["tile.n"], 64);
  EXPECT_EQ(json["schedule_backward"]["fusion"], "layer");
  EXPECT_EQ(json["schedule_backward"]["tile.n"], 64);
  EXPECT_EQ(json["schedule_backward"]["backward.wgrad"], "after");
}

TEST(Run, AScheduleMayComeFromAFile) {
  const TemporaryFolder folder;
  const std::string file = (folder / "schedule.json").string();
  io::write_file(file, run_json({"--schedule", "fusion=pairs,tile.n=64"})["schedule"].dump());
  EXPECT_EQ(run_json({"--schedule", file})["schedule"], run_json({"--schedule", "fusion=pairs,tile.n=64"})["schedule"]);
}

// The bytes that move, counted anew from the definition.
TEST(Run, BytesMovedCountRows) {
  const TemporaryFolder folder;
  const std::string routing = (folder / "routing.npy").string();
  // 2 ranks, 4 experts of 2 groups or 4: experts 0 and 1 on rank 0, 2 and 3 on rank 1.
  io::write_npy(routing, {{4, 3}, std::vector<int32_t>{0, 1, 2, 2, 3, -1, -1, -1, -1, 0, 3, 1}});
  const auto bytes = [&](const char* dedup, const char* groups) {
    const CommandResult result = run_command({"run",
                                              "--engine",
                                              "cpu",
                                              "--ranks",
                                              "2",
                                              "--tokens",
                                              "3,1",
                                              "--hidden",
                                              "16",
                                              "--intermediate",
                                              "8",
                                              "--experts",
                                              "4",
                                              "--topk",
                                              "3",
                                              "--routing",
                                              routing,
                                              "--combine-groups",
                                              groups,
                                              "--schedule",
                                              std::string("dispatch.dedup=") + dedup,
                                              "--check",
                                              "--json",
                                              "-"});
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["bytes_moved"];
  };
  const int row = 16 * 2;
  const auto matrix = [&](int a, int b, int c, int d) { return Json{{a * row, b * row}, {c * row, d * row}}; };
  EXPECT_EQ(bytes("off", "0")["dispatch"], matrix(2, 3, 2, 1));
  EXPECT_EQ(bytes("on", "0")["dispatch"], matrix(1, 2, 1, 1));
  EXPECT_EQ(bytes("on", "0")["combine"], matrix(2, 2, 3, 1));
  EXPECT_EQ(bytes("on", "2")["combine"], matrix(1, 1, 2, 1));
  EXPECT_EQ(bytes("on", "4")["combine"], matrix(2, 2, 3, 1));
}

TEST(Run, BiasesPassTheCheckAndHaveTheBitsOfTheSequentialRun) {
  for (const char* weight : {"activation", "output"}) {
    const Json json = run_json({"--backward", "--bias", "--router-weight", weight, "--wgrad", "main_grad", "--check",
                                "--compare", "sequential", "--repeat", "1"});
    EXPECT_EQ(json["numerics"]["bias"], true);
    EXPECT_EQ(keys_of(json["check"]), (std::set<std::string>{"y", "z", "dx", "dprobs", "dw1", "dw2", "db1", "db2"}));
    for (const auto& [name, check] : json["check"].items()) EXPECT_TRUE(check["passed"]) << name;
    EXPECT_EQ(json["sequential"]["same_bits"], true);
  }
  const CommandResult result = run_command(join(kSmall, {"--bias", "--router-weight", "input"}));
  EXPECT_NE(result.status, 0);
  EXPECT_NE(result.err.find("bias=1: not with router_weight=input"), std::string::npos) << result.err;
}

TEST(Run, OutHoldsTheTensorsOfTheChecksums) {
  const TemporaryFolder folder;
  for (const char* mode : {"bf16", "fp32", "main_grad"}) {
    const std::string file = (folder / "out.safetensors").string();
    const bool bias = mode != std::string("fp32");
    Arguments options = {"--backward", "--wgrad", mode, "--out", file};
    if (bias) options.emplace_back("--bias");
    const Json json = run_json(options);
    const io::Safetensors out = io::open_safetensors(file);
    const int64_t rows = 48 * 3;
    std::map<std::string, std::vector<int64_t>> shapes = {{"y", {48, 40}},      {"z", {rows, 48}},
                                                          {"dx", {48, 40}},     {"dprobs", {48, 3}},
                                                          {"dw1", {8, 48, 40}}, {"dw2", {8, 40, 24}}};
    if (bias) shapes.insert({{"db1", {8, 48}}, {"db2", {8, 40}}});
    ASSERT_EQ(out.tensors().size(), shapes.size());
    for (const auto& [name, shape] : shapes) {
      const io::Tensor& tensor = out.at(name);
      EXPECT_EQ(tensor.shape, shape) << name;
      const bool wide =
          name == "dprobs" || ((name.starts_with("dw") || name.starts_with("db")) && mode != std::string("bf16"));
      ASSERT_EQ(tensor.dtype, wide ? "F32" : "BF16") << name << " " << mode;
      uint64_t sum = 0;
      if (wide) {
        std::vector<float> values(tensor.elements());
        out.read(name, 0, std::span<float>(values));
        sum = io::checksum(values.data(), tensor.elements(), 0);
      } else {
        std::vector<BFloat16> values(tensor.elements());
        out.read(name, 0, std::span<BFloat16>(values));
        sum = io::checksum(values.data(), tensor.elements(), 0);
      }
      EXPECT_EQ(json["checksum"][name], io::to_hex16(sum)) << name << " " << mode;
    }
  }
}

TEST(Run, BackwardOnAGpuPassesTheCheckAndIsTheSameOnVirtualRanks) {
  if (run_command({"info", "--json", "-"}).json()["engines"]["cuda"]["available"] != true) {
    GTEST_SKIP() << "no Hopper GPU";
  }
  for (const char* mode : {"bf16", "fp32", "main_grad"}) {
    Json first;
    for (const auto& [ranks, schedule] :
         {std::pair("1", "fusion=none"), {"2", "fusion=pairs"}, {"4", "fusion=pairs,save.xg=redispatch"}}) {
      const TemporaryFolder folder;
      const CommandResult result = run_command({"run",
                                                "--engine",
                                                "cuda",
                                                "--hidden",
                                                "136",
                                                "--intermediate",
                                                "200",
                                                "--experts",
                                                "8",
                                                "--topk",
                                                "3",
                                                "--ranks",
                                                ranks,
                                                "--tokens",
                                                std::to_string(240 / std::stoi(ranks)),
                                                "--routing",
                                                "zipf:0.7",
                                                "--backward",
                                                "--wgrad",
                                                mode,
                                                "--check",
                                                "--schedule",
                                                std::string(schedule) + ",dispatch.transport=pull",
                                                "--trace",
                                                (folder / "trace.json").string(),
                                                "--json",
                                                "-"});
      ASSERT_EQ(result.status, 0) << result.err;
      const Json json = result.json();
      if (first.is_null()) first = json;
      EXPECT_EQ(json["checksum"], first["checksum"]) << ranks << " ranks, " << mode;
      EXPECT_EQ(keys_of(json["checksum"]), (std::set<std::string>{"y", "z", "dx", "dprobs", "dw1", "dw2"}));
      EXPECT_NE(io::read_text_file((folder / "trace.json").string()).find("wgrad"), std::string::npos);
    }
  }
}

// What the synthetic generators give, handed in through files instead, must give the same run.
TEST(Run, FilesGiveTheSameAsSyntheticData) {
  const TemporaryFolder folder;
  const int64_t tokens = 48, hidden = 40, intermediate = 24, experts = 8, topk = 3;
  std::vector<int32_t> ids(tokens * topk);
  io::make_routing(io::parse_routing_kind("zipf:0.7"), {11, 0, tokens}, experts, topk, ids.data());
  std::vector<float> probs(ids.size());
  io::fill_probs({11, 0, tokens}, topk, ids.data(), probs.data());
  std::vector<BFloat16> x(tokens * hidden), dy(x.size()), w1(experts * 2 * intermediate * hidden), w2(w1.size() / 2);
  io::fill_tokens(io::SyntheticTensor::kX, {11, 0, tokens}, hidden, x.data());
  io::fill_tokens(io::SyntheticTensor::kDy, {11, 0, tokens}, hidden, dy.data());
  io::fill_weights(io::SyntheticTensor::kW1, {11, 0, experts}, {hidden, intermediate}, w1.data());
  io::fill_weights(io::SyntheticTensor::kW2, {11, 0, experts}, {hidden, intermediate}, w2.data());

  io::write_npy((folder / "ids32.npy").string(), {{tokens, topk}, ids});
  io::write_npy((folder / "ids64.npy").string(), {{tokens, topk}, std::vector<int64_t>(ids.begin(), ids.end())});
  io::write_npy((folder / "probs.npy").string(), {{tokens, topk}, probs});
  std::vector<float> wide_x(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const uint32_t bits = uint32_t{x[i].bits} << 16;
    std::memcpy(&wide_x[i], &bits, sizeof bits);
  }
  {
    io::SafetensorsWriter writer((folder / "tensors.safetensors").string(),
                                 {{"x", "F32", {tokens, hidden}},
                                  {"dy", "BF16", {tokens, hidden}},
                                  {"w1", "BF16", {experts, 2 * intermediate, hidden}},
                                  {"w2", "BF16", {experts, hidden, intermediate}}});
    writer.append(std::as_bytes(std::span(wide_x)));
    writer.append(std::as_bytes(std::span(dy)));
    writer.append(std::as_bytes(std::span(w1)));
    writer.append(std::as_bytes(std::span(w2)));
    writer.commit();
  }
  const Json synthetic = run_json({"--backward"});
  Arguments layer = kSmall;
  const auto routing = std::find(layer.begin(), layer.end(), "zipf:0.7");
  for (const char* ids_file : {"ids32.npy", "ids64.npy"}) {
    *routing = (folder / ids_file).string();
    const Arguments files = {"--seed",     "999",
                             "--probs",    (folder / "probs.npy").string(),
                             "--tensors",  (folder / "tensors.safetensors").string(),
                             "--backward", "--json",
                             "-"};
    Arguments arguments = layer;
    arguments.resize(arguments.size() - 2);  // without --seed 11
    const CommandResult result = run_command(join(arguments, files));
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.json()["checksum"], synthetic["checksum"]) << ids_file;
  }
}

TEST(Run, AFailedCheckIsStatusOneAndNamesTheTensor) {
  const TemporaryFolder folder;
  // An infinite x makes y infinite or NaN, which no check passes.
  std::vector<BFloat16> x(48 * 40, BFloat16{0x7f80});
  {
    io::SafetensorsWriter writer((folder / "x.safetensors").string(), {{"x", "BF16", {48, 40}}});
    writer.append(std::as_bytes(std::span(x)));
    writer.commit();
  }
  const CommandResult result =
      run_command(join(kSmall, {"--tensors", (folder / "x.safetensors").string(), "--check", "--json", "-"}));
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(result.one_line_error()) << result.err;
  EXPECT_NE(result.err.find("uniep run: --check: y: "), std::string::npos) << result.err;
  EXPECT_EQ(result.json()["check"]["y"]["passed"], false);
}

TEST(Run, SmallGradientsInMainGradPassTheCheck) {
  const TemporaryFolder folder;
  const std::string file = (folder / "dy.safetensors").string();
  std::vector<BFloat16> dy;
  for (int i = 0; i < 48 * 40; ++i) dy.push_back({static_cast<uint16_t>(0x3200 + i % 97)});  // near 8e-9
  {
    io::SafetensorsWriter writer(file, {{"dy", "BF16", {48, 40}}});
    writer.append(std::as_bytes(std::span(dy)));
    writer.commit();
  }
  const CommandResult result =
      run_command(join(kSmall, {"--tensors", file, "--backward", "--check", "--wgrad", "main_grad", "--bias"}));
  EXPECT_EQ(result.status, 0) << result.err;
}

TEST(Run, LargeLayersAreCheckedOnASample) {
  const CommandResult result =
      run_command({"run", "--ranks", "1", "--workers", "2", "--tokens", "1100", "--hidden", "1280", "--intermediate",
                   "1024", "--experts", "2", "--topk", "2", "--check", "--json", "-"});
  ASSERT_EQ(result.status, 0) << result.err;
  const Json json = result.json();
  EXPECT_EQ(json["check_sampled"], true);
  EXPECT_GT(json["check_sampled_tokens"], 0);
  EXPECT_LT(json["check_sampled_tokens"], 1100);
  EXPECT_TRUE(json["check"]["y"]["passed"]);
}

TEST(Run, NoTokensAtAll) {
  const CommandResult result = run_command({"run", "--tokens", "0", "--backward", "--check", "--json", "-"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.json()["checksum"]["y"], "0000000000000000");
  EXPECT_NE(result.json()["checksum"]["dw1"], "");
}

TEST(Run, JsonGoesIntoAFileAndTheTableStaysAway) {
  const TemporaryFolder folder;
  const CommandResult result = run_command({"run", "--json", (folder / "report.json").string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(Json::parse(io::read_text_file((folder / "report.json").string()))["ranks"], 4);
}

TEST(Run, AShapeGivesAllSizesAndSingleOnesOverrideIt) {
  const Arguments small = {"run", "--engine", "cpu", "--tokens", "8", "--json", "-", "--experts", "4"};
  EXPECT_EQ(run_command(join(small, {"--shape", "40,24,8,3"})).json()["shape"],
            Json::parse(R"({"hidden": 40, "intermediate": 24, "experts": 4, "topk": 3})"));
}

TEST(Run, TheTableSaysHowRowsSpreadAndWholeSchedulesWhenAsked) {
  const Arguments one = {"run",      "--shape", "40,24,8,3", "--tokens", "13,0,29,6",  "--ranks",  "4",
                         "--engine", "cpu",     "--routing", "one",      "--schedule", "tile.n=64"};
  const CommandResult brief = run_command(one);
  EXPECT_NE(brief.out.find("12 a rank on average, 48 at most: max / mean 4.000"), std::string::npos) << brief.out;
  EXPECT_NE(brief.out.find("tile.n=64; --verbose"), std::string::npos) << brief.out;
  EXPECT_EQ(brief.out.find("order.raster"), std::string::npos) << brief.out;
  EXPECT_NE(run_command(join(one, {"--verbose"})).out.find("order.raster"), std::string::npos);
}

TEST(Run, ComparesWithTheSequentialRun) {
  const Arguments compare = {"--backward", "--compare", "sequential", "--wgrad", "main_grad"};
  const Json json = run_json(compare);
  const Json& sequential = json["sequential"];
  EXPECT_EQ(keys_of(sequential),
            (std::set<std::string>{"schedule", "schedule_backward", "forward_ms", "backward_ms", "same_bits"}));
  EXPECT_EQ(sequential["schedule"]["fusion"], "none");
  EXPECT_EQ(sequential["schedule_backward"]["fusion"], "none");
  EXPECT_EQ(sequential["same_bits"], true);
  EXPECT_EQ(sequential["forward_ms"]["all"].size(), 5u);
  EXPECT_EQ(json["backward_ms"]["all"].size(), 5u);
  EXPECT_EQ(json["checksum"], run_json({"--backward", "--wgrad", "main_grad"})["checksum"]);

  const Arguments forward =
      join(kSmall, {"--compare", "sequential", "--repeat", "2", "--schedule", "save.xg=redispatch"});
  const CommandResult table = run_command(forward);
  EXPECT_EQ(table.status, 0) << table.err;
  EXPECT_NE(table.out.find("\nsequential forward"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("same bits; forward "), std::string::npos) << table.out;
  EXPECT_EQ(table.out.find("backward"), std::string::npos) << table.out;
}

TEST(Run, WaysToSaveChangeNoBit) {
  const Json expected = run_json({"--backward"})["checksum"];
  for (const char* save : {"keep", "redispatch", "rows", "recompute"}) {
    const TemporaryFolder folder;
    const std::string file = (folder.path() / "out.safetensors").string();
    const Json json = run_json({"--backward", "--save", save, "--check", "--compare", "sequential", "--out", file});
    const bool keeps_z = std::string(save) == "keep" || std::string(save) == "redispatch";
    EXPECT_EQ(json["schedule"]["save.z"], keeps_z ? "keep" : "recompute");
    EXPECT_EQ(json["schedule_backward"]["save.xg"],
              std::string(save) == "keep" || std::string(save) == "rows" ? "keep" : "redispatch");
    EXPECT_EQ(json["sequential"]["same_bits"], true);
    EXPECT_EQ(json["checksum"].contains("z"), keeps_z);
    for (const auto& [name, sum] : json["checksum"].items()) EXPECT_EQ(sum, expected[name]) << save << " " << name;
    EXPECT_EQ(std::filesystem::exists(file), true);
  }
}

TEST(Run, ResultsDifferWhereASingleBitDoes) {
  cli::LayerResult one;
  one.y.resize(3);
  one.dprobs = {0.0f};
  cli::LayerResult other = one;
  EXPECT_TRUE(one == other);
  other.y[2].bits ^= 1;
  other.dprobs[0] = -0.0f;
  EXPECT_EQ(one.differences(other), (Arguments{"y", "dprobs"}));
}

TEST(CommandLine, HelpWithoutACommand) {
  const CommandResult help = run_command({"--help"});
  for (const Arguments& arguments : {Arguments{}, Arguments{"help"}}) {
    const CommandResult shown = run_command(arguments);
    EXPECT_EQ(shown.status, 0);
    EXPECT_EQ(shown.err, "");
    EXPECT_EQ(shown.out, help.out);
  }
  EXPECT_EQ(run_command({"help", "bench"}).out, run_command({"bench", "--help"}).out);
}

TEST(CommandLine, HelpOffersNoValueThatIsRefused) {
  EXPECT_NE(run_command({"run", "--help"}).out.find("--repeat"), std::string::npos);
  for (const char* command : {"run", "schedule"}) {
    const std::string help = run_command({command, "--help"}).out;
    for (const char* offer : {"0: one run", "0: the filled one"}) EXPECT_EQ(help.find(offer), std::string::npos);
  }
}

TEST(CommandLine, HelpAndVersion) {
  for (const Arguments& arguments : std::vector<Arguments>{
           {"--help"}, {"run", "--help"}, {"schedule", "--help"}, {"info", "--help"}, {"trace", "--help"}}) {
    const CommandResult help = run_command(arguments);
    EXPECT_EQ(help.status, 0);
    EXPECT_EQ(help.err, "");
    EXPECT_NE(help.out.find("Usage: uniep"), std::string::npos) << help.out;
  }
  const CommandResult run_help = run_command({"run", "--help"});
  for (const char* option :
       {"--engine",  "--ranks",   "--tokens",  "--shape",    "--hidden",  "--intermediate",   "--experts",
        "--topk",    "--routing", "--probs",   "--tensors",  "--seed",    "--schedule",       "--schedule-backward",
        "--workers", "--devices", "--launch",  "--backward", "--wgrad",   "--combine-groups", "--capacity",
        "--check",   "--compare", "--verbose", "--repeat",   "--shuffle", "--trace",          "--json",
        "--out",     "--bias"}) {
    EXPECT_NE(run_help.out.find(option), std::string::npos) << option;
  }
  const CommandResult version = run_command({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.out, "uniep " UNIEP_VERSION_STRING "\n");
}

}  // namespace
}  // namespace uniep::test
