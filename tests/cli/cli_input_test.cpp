// Bad usage and bad input: exit status 2 (1 where a device, a file or memory fails), one line on stderr that names the
// argument, and nothing on stdout.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <random>

#include "cli/memory_limit.h"
#include "io/file.h"
#include "io/npy.h"
#include "io/safetensors_writer.h"
#include "support/command.h"
#include "support/temporary_folder.h"
#include "uniep/bfloat16.h"

namespace uniep::test {
namespace {

using Arguments = std::vector<std::string>;

const Arguments kLayer = {"run", "--ranks",   "2", "--tokens", "3,2", "--hidden", "16", "--intermediate",
                          "8",   "--experts", "4", "--topk",   "2"};
constexpr int64_t kTokens = 5, kTopk = 2;

struct BadUsage {
  Arguments more;
  Arguments named;
};

TEST(BadUsage, IsRefusedWithTheArgumentsName) {
  const std::vector<BadUsage> cases = {
      {{"--ranks", "3"}, {"experts: 4", "3 ranks"}},
      {{"--ranks", "0"}, {"--ranks", "'0'", "1 to 64"}},
      {{"--ranks", "65"}, {"--ranks", "'65'"}},
      {{"--ranks", "two"}, {"--ranks", "'two'"}},
      {{"--ranks", "2.5"}, {"--ranks", "'2.5'"}},
      {{"--topk", "5"}, {"topk: 5", "4"}},
      {{"--topk", "0"}, {"--topk"}},
      {{"--hidden", "12"}, {"hidden: 12", "multiple of 8"}},
      {{"--intermediate", "7"}, {"intermediate: 7"}},
      {{"--experts", "-4"}, {"--experts", "'-4'"}},
      {{"--tokens", "1,2,3"}, {"--tokens", "3 numbers", "2 ranks"}},
      {{"--tokens", "1,,3"}, {"--tokens", "'1,,3'"}},
      {{"--tokens", "-1"}, {"--tokens", "'-1'"}},
      {{"--seed", "1e3"}, {"--seed", "'1e3'"}},
      {{"--seed", "18446744073709551616"}, {"--seed"}},
      {{"--workers", "5000"}, {"--workers"}},
      {{"--routing", "zipf"}, {"--routing", "'zipf'", "uniform"}},
      {{"--routing", "zipf:nan"}, {"--routing", "zipf:nan"}},
      {{"--wgrad", "fp16"}, {"--wgrad", "'fp16'", "bf16|fp32|main_grad"}},
      {{"--engine", "gpu"}, {"--engine", "'gpu'", "cpu|cuda|auto"}},
      {{"--launch", "fibers"}, {"--launch", "'fibers'"}},
      {{"--combine-groups", "3"}, {"--combine-groups", "'3'"}},
      {{"--combine-groups", "1"}, {"--combine-groups", "'1'"}},
      {{"--capacity", "-1"}, {"--capacity"}},
      {{"--capacity", "1152921504606846976"}, {"--capacity", "2147483519"}},
      {{"--repeat", "0"}, {"--repeat"}},
      {{"--shuffle", "0"}, {"--shuffle"}},
      {{"--engine", "cpu", "--devices", "0,1"}, {"--devices", "0,1"}},
      {{"--devices", "a"}, {"--devices"}},
      {{"--engine", "cpu", "--launch", "processes"}, {"launch"}},
      {{"--schedule", "fusionn=layer"}, {"--schedule", "'fusionn'", "fusion"}},
      {{"--schedule", "fusion=double"}, {"--schedule", "fusion=double", "none"}},
      {{"--schedule", "tile.n=100"}, {"--schedule", "tile.n=100", "128"}},
      {{"--schedule", "tile.n=128,tile.n=256"}, {"--schedule", "tile.n", "twice"}},
      {{"--schedule", "no-such-file.json"}, {"--schedule", "no-such-file.json"}},
      {{"--schedule", "{\"fusion\": "}, {"--schedule", "JSON"}},
      {{"--schedule", "{\"a\nb\": 1}"}, {"--schedule"}},
      {{"--backward", "--schedule-backward", "save.xg=perhaps"}, {"--schedule-backward", "save.xg=perhaps"}},
      {{"--save", "never"}, {"--save", "'never'", "keep|redispatch|rows|recompute"}},
      {{"--save", "rows", "--schedule", "save.xg=keep"}, {"--save", "save.xg"}},
      {{"--backward", "--save", "keep", "--schedule-backward", "save.z=keep"}, {"--save", "save.z"}},
      {{"--schedule", "order.experts_per_wave=64"}, {"--schedule", "order.experts_per_wave=64"}},
      {{"--no-such-option"}, {"--no-such-option"}},
      {{"positional"}, {"positional"}},
      {{"--json"}, {"--json"}},
      {{"--ranks", "2", "--ranks", "4"}, {"--ranks"}},
  };
  for (const BadUsage& bad : cases) {
    // A later value would be a second one: take out what the case gives itself.
    Arguments arguments = kLayer;
    for (std::size_t i = 0; i + 1 < arguments.size();) {
      if (i > 0 && arguments[i].starts_with("--") && std::count(bad.more.begin(), bad.more.end(), arguments[i]) == 1) {
        arguments.erase(arguments.begin() + static_cast<int64_t>(i), arguments.begin() + static_cast<int64_t>(i) + 2);
      } else {
        ++i;
      }
    }
    expect_failure(join(arguments, bad.more), 2, bad.named);
  }
}

TEST(BadUsage, OfTheProgramItself) {
  expect_failure({"fly"}, 2, {"fly", "run"});
  expect_failure({"trace"}, 2, {"file"});
  expect_failure({"trace", "a.json"}, 2, {"--svg"});
  expect_failure({"schedule", "--sample", "x"}, 2, {"--sample"});
  expect_failure({"schedule", "--direction", "up"}, 2, {"--direction", "forward|backward"});
  expect_failure({"schedule", "--count", "--vary", "nonsense"}, 2, {"nonsense"});
  expect_failure({"info", "--shape", "unknown-model"}, 2, {"--shape", "unknown-model", "deepseek-v3"});
  expect_failure({"info", "--shape", "1,2,3"}, 2, {"--shape", "1,2,3"});
  expect_failure({"run", "--shape", "1,2,3"}, 2, {"--shape", "1,2,3"});
  expect_failure({"run", "--compare", "nothing"}, 2, {"--compare", "'nothing'", "sequential"});
  expect_failure({"help", "fly"}, 2, {"fly", "run"});
}

TEST(BadUsage, CudaWhereThereIsNone) {
  const Arguments cuda = join(kLayer, {"--engine", "cuda"});
  if (run_command({"info", "--json", "-"}).json()["engines"]["cuda"]["available"] == true) {
    EXPECT_EQ(run_command(cuda).status, 0);
  } else {
    expect_failure(cuda, 2, {"engine", "cuda"});
  }
}

// Each command that may have either engine.
TEST(BadUsage, GpusBesideTheCpuEngine) {
  const Arguments small = {"--engine", "cpu",     "--ranks",   "2",         "--tokens",
                           "8",        "--shape", "64,32,8,2", "--devices", "0,1"};
  for (const Arguments& command : {Arguments{"run"}, Arguments{"tune", "--budget", "1"},
                                   Arguments{"bench", "--op", "layer", "--tune", "online", "--steps", "1"}}) {
    expect_failure(join(command, small), 2, {"--devices: 0,1 names GPUs, and the engine is cpu"});
  }
}

TEST(BadUsage, APageOfNoTokens) {
  const TemporaryFolder folder;
  for (const Arguments& command : {Arguments{"tune", "--engine", "cpu"}, Arguments{"simulate"}}) {
    expect_failure(join(command, {"--ranks", "2", "--tokens", "0,0", "--shape", "64,32,8,2", "--report",
                                  (folder / "page.html").string()}),
                   2, {"--tokens: '0'; must be more than 0 on some rank with --report"});
  }
  EXPECT_EQ(folder.entries(), 0U);
}

TEST(MemoryLimit, LeavesThePageCacheOut) {
  const TemporaryFolder folder;
  const auto write = [&](const char* name, const std::string& text) { io::write_file(folder / name, text); };
  EXPECT_TRUE(std::isinf(cli::control_group_bytes(folder.path())));  // no control group
  write("memory.max", "max\n");
  EXPECT_TRUE(std::isinf(cli::control_group_bytes(folder.path())));
  write("memory.max", "1000\n");
  write("memory.current", "900\n");
  EXPECT_EQ(cli::control_group_bytes(folder.path()), 100);
  write("memory.stat", "anon 150\nfile 750\nshmem 50\nactive_file 300\ninactive_file 400\nslab 10\n");
  EXPECT_EQ(cli::control_group_bytes(folder.path()), 800);
  write("memory.current", "2000\n");  // above the limit for a moment
  EXPECT_EQ(cli::control_group_bytes(folder.path()), 0);
}

TEST(BadSizes, NeitherOverflowNorExhaustMemory) {
  const std::string huge = "9223372036854775807";
  for (const char* option : {"--hidden", "--intermediate", "--experts", "--topk", "--tokens"}) {
    expect_failure({"run", option, huge}, 2, {std::string(option).substr(2)});
    expect_failure({"run", option, huge + "0"}, 2, {option});
  }
  expect_failure({"run", "--tokens", huge, "--topk", "2"}, 2, {"--tokens"});
  expect_failure({"run", "--tokens", "1000000000"}, 2, {"--tokens"});
  expect_failure({"info", "--tokens", huge}, 2, {"--tokens"});
  expect_failure({"schedule", "--check", "--tokens", huge}, 2, {"--tokens"});
  // Legal one by one, and far more than any machine's memory together.
  expect_failure({"run", "--hidden", "1048576", "--intermediate", "1048576", "--experts", "65536"}, 1,
                 {"out of memory"});
  expect_failure({"run", "--engine", "cpu", "--ranks", "2", "--hidden", "4096", "--intermediate", "4096", "--experts",
                  "4", "--topk", "2", "--tokens", "2", "--capacity", "2000000000"},
                 1, {"out of memory"});
  // Nearly all of it is padding: a row an expert.
  constexpr int64_t kHidden = 8192, kPaddingOfExpert = 127 * 2 * (2 * kHidden + 5 * 8);
  const auto experts = static_cast<int64_t>(2 * cli::available_memory_bytes() / static_cast<double>(kPaddingOfExpert));
  if (experts > 1 << 20) return;
  expect_failure({"run", "--engine", "cpu", "--ranks", "1", "--hidden", std::to_string(kHidden), "--intermediate", "8",
                  "--experts", std::to_string(experts), "--topk", "1", "--tokens", std::to_string(experts)},
                 1, {"out of memory"});
}

class BadFiles : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  template <typename T>
  std::string npy(const std::string& name, std::vector<int64_t> shape, std::vector<T> values) {
    io::write_npy(path(name), {std::move(shape), std::move(values)});
    return path(name);
  }

  std::string safetensors(const std::string& name, const io::TensorSpec& spec, std::size_t bytes) {
    io::SafetensorsWriter writer(path(name), {spec});
    const std::vector<std::byte> zeros(bytes);
    writer.append(zeros);
    writer.commit();
    return path(name);
  }

  // Every prefix of a file, at `step` bytes' distance.
  template <typename Visit>
  void for_each_truncation(const std::string& file, std::size_t step, Visit&& visit) {
    const std::string whole = io::read_text_file(file);
    for (std::size_t length = 0; length < whole.size(); length += step) {
      io::write_file(path("truncated"), std::string_view(whole).substr(0, length));
      visit(path("truncated"));
    }
  }

  TemporaryFolder folder_;
};

TEST_F(BadFiles, Routing) {
  const auto refused = [&](const std::string& file, const Arguments& named) {
    expect_failure(join(kLayer, {"--routing", file}), 2, join({"--routing"}, named));
  };
  const std::vector<int32_t> good = {0, 1, 2, 3, 0, 3, -1, -1, 1, 2};
  EXPECT_EQ(run_command(join(kLayer, {"--routing", npy("good.npy", {kTokens, kTopk}, good)})).status, 0);

  std::vector<int32_t> ids = good;
  ids[5] = 4;
  refused(npy("large.npy", {kTokens, kTopk}, ids), {"token 2, slot 1", "holds 4", "0 to 3"});
  ids[5] = -2;
  refused(npy("small.npy", {kTokens, kTopk}, ids), {"token 2, slot 1", "holds -2"});
  ids[5] = 0;
  refused(npy("twice.npy", {kTokens, kTopk}, ids), {"token 2, slot 1", "expert 0", "second time"});
  std::vector<int64_t> wide(good.begin(), good.end());
  wide[8] = (int64_t{1} << 32) + 1;  // 1, if it were cut to 32 bits
  refused(npy("wide.npy", {kTokens, kTopk}, wide), {"token 4, slot 0", "holds 4294967297"});

  refused(npy("shape.npy", {kTopk, kTokens}, good), {"[2, 5]", "[5, 2]"});
  refused(npy("flat.npy", {kTokens * kTopk}, good), {"[10]", "[5, 2]"});
  refused(npy("float.npy", {kTokens, kTopk}, std::vector<float>(10)), {"float32"});
  for_each_truncation(path("good.npy"), 7, [&](const std::string& file) {
    expect_failure(join(kLayer, {"--routing", file}), 2, {"--routing", "truncated"});
  });
  expect_failure(join(kLayer, {"--routing", path("missing.npy")}), 1, {"--routing", "missing.npy"});
}

TEST_F(BadFiles, Probs) {
  std::vector<float> probs(kTokens * kTopk, 0.5f);
  const auto refused = [&](const Arguments& more, const Arguments& named) {
    expect_failure(join(kLayer, more), 2, named);
  };
  EXPECT_EQ(run_command(join(kLayer, {"--probs", npy("good.npy", {kTokens, kTopk}, probs)})).status, 0);
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    probs[7] = bad;
    refused({"--probs", npy("bad.npy", {kTokens, kTopk}, probs)}, {"--probs", "token 3, slot 1", "finite"});
  }
  // An unused slot's is ignored.
  const Arguments unused = {"--routing",
                            npy("ids.npy", {kTokens, kTopk}, std::vector<int32_t>{0, 1, 2, 3, 0, 3, 2, -1, 1, 2})};
  const CommandResult ignored = run_command(join(join(kLayer, unused), {"--probs", path("bad.npy"), "--check"}));
  EXPECT_EQ(ignored.status, 0) << ignored.err;

  refused({"--probs", npy("ints.npy", {kTokens, kTopk}, std::vector<int32_t>(10))}, {"--probs", "float32"});
  refused({"--probs", npy("shape.npy", {kTokens, 3}, std::vector<float>(15))}, {"--probs", "[5, 3]", "[5, 2]"});
  refused(
      {"--probs", path("good.npy"), "--tensors", safetensors("p.safetensors", {"probs", "F32", {kTokens, kTopk}}, 40)},
      {"--probs", "--tensors"});
  for_each_truncation(path("good.npy"), 9, [&](const std::string& file) {
    refused({"--probs", file}, {"--probs", "truncated"});
  });
}

TEST_F(BadFiles, Tensors) {
  const auto refused = [&](const std::string& file, const Arguments& named) {
    expect_failure(join(kLayer, {"--tensors", file, "--backward"}), 2, join({"--tensors"}, named));
  };
  struct Wrong {
    const char* name;
    std::vector<int64_t> shape;
    const char* shown;
    const char* expected;
  };
  for (const Wrong& wrong :
       {Wrong{"x", {5, 8}, "[5, 8]", "[5, 16]"}, Wrong{"dy", {16, 5}, "[16, 5]", "[5, 16]"},
        Wrong{"w1", {4, 8, 16}, "[4, 8, 16]", "[4, 16, 16]"}, Wrong{"w2", {4, 8, 16}, "[4, 8, 16]", "[4, 16, 8]"},
        Wrong{"probs", {10}, "[10]", "[5, 2]"}}) {
    std::size_t elements = 1;
    for (const int64_t extent : wrong.shape) elements *= static_cast<std::size_t>(extent);
    refused(safetensors("wrong.safetensors", {wrong.name, "F32", wrong.shape}, 4 * elements),
            {wrong.name, wrong.shown, wrong.expected});
  }
  refused(safetensors("dtype.safetensors", {"x", "F16", {5, 16}}, 160), {"x", "F16"});
  refused(safetensors("name.safetensors", {"weights", "F32", {5, 16}}, 320), {"weights", "w1"});
  const std::string good = safetensors("good.safetensors", {"x", "BF16", {5, 16}}, 160);
  EXPECT_EQ(run_command(join(kLayer, {"--tensors", good})).status, 0);
  for_each_truncation(good, 11, [&](const std::string& file) { refused(file, {"truncated"}); });
  expect_failure(join(kLayer, {"--tensors", path("missing")}), 1, {"--tensors", "missing"});
}

// Random bytes in place of every kind of file: an error or, hardly ever, a legal file; never anything else.
TEST_F(BadFiles, RandomBytes) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 60; ++round) {
    std::string bytes = round % 3 == 0   ? std::string("\x93NUMPY\x01\x00", 8)
                        : round % 3 == 1 ? "{\"traceEvents\": ["
                                         : "";
    for (int i = static_cast<int>(random() % 300); i > 0; --i) bytes += static_cast<char>(random());
    io::write_file(path("bytes.npy"), bytes);
    for (const char* option : {"--routing", "--probs", "--tensors", "--schedule"}) {
      expect_failure(join(kLayer, {option, path("bytes.npy")}), 2, {option});
    }
    expect_failure({"trace", path("bytes.npy"), "--svg", path("out.svg")}, 2, {"bytes.npy"});
  }
}

TEST_F(BadFiles, Outputs) {
  for (const char* option : {"--out", "--json", "--trace"}) {
    expect_failure(join(kLayer, {option, "/dev/full"}), 1, {option, "/dev/full"});
    expect_failure(join(kLayer, {option, path("no/such/folder/file")}), 1, {option, "no/such/folder"});
    expect_failure(join(kLayer, {option, folder_.path().string()}), 1, {option});
  }
  expect_failure({"info", "--json", "/dev/full"}, 1, {"/dev/full"});
  ASSERT_EQ(run_command(join(kLayer, {"--trace", path("trace.json")})).status, 0);
  expect_failure({"trace", path("trace.json"), "--svg", "/dev/full"}, 1, {"/dev/full"});
  expect_failure({"trace", path("missing.json"), "--svg", path("out.svg")}, 1, {"missing.json"});
  EXPECT_EQ(folder_.entries(), 1u) << "a failed command left a file";
}

TEST_F(BadFiles, EmptyPathsAreRefused) {
  for (const char* option : {"--out", "--json", "--trace", "--probs", "--tensors", "--tuned", "--routing"}) {
    expect_failure(join(kLayer, {option, ""}), 2, {option, "''"});
  }
  expect_failure({"train", "--steps", "1", "--resume", "", "--checkpoint", path("good")}, 2,
                 {"--resume: ''", "a path"});
  expect_failure({"train", "--text", ""}, 2, {"--text: ''"});
  expect_failure({"trace", "", "--svg", path("out.svg")}, 2, {"file: ''"});
  EXPECT_EQ(folder_.entries(), 0u);
}

TEST_F(BadFiles, OneFileIsNotTwoOutputsNorAnInput) {
  const std::string again = folder_.path().string() + "/./a";
  expect_failure(join(kLayer, {"--json", path("a"), "--out", again}), 2, {"--json", "--out", "another one"});
  expect_failure(join(kLayer, {"--json", path("a"), "--trace", path("a")}), 2, {"--json", "--trace"});
  io::write_file(path("t"), "{}");
  std::filesystem::create_symlink(path("t"), path("link"));
  expect_failure({"trace", path("t"), "--svg", path("link")}, 2, {"--svg", "file"});
  expect_failure(join(kLayer, {"--schedule", path("t"), "--json", path("t")}), 2, {"--json", "--schedule"});
  expect_failure({"train", "--text", path("t"), "--checkpoint", path("t")}, 2, {"--checkpoint", "--text"});
  expect_failure({"train", "--checkpoint", path("c"), "--resume", path("c"), "--json", path("c")}, 2, {"--json"});
  EXPECT_EQ(io::read_text_file(path("t")), "{}");
  EXPECT_EQ(folder_.entries(), 2u);
  EXPECT_EQ(run_command(join(kLayer, {"--json", "/dev/null", "--trace", "/dev/null"})).status, 0);
}

TEST_F(BadFiles, AFailedRunLeavesNoFiles) {
  const Arguments outputs = {"--json", path("a.json"), "--trace", path("b.json"), "--out", path("c.safetensors")};
  expect_failure(join(join(kLayer, outputs), {"--capacity", "1"}), 1, {"capacity", "rank 0"});
  EXPECT_EQ(folder_.entries(), 0u);
}

// A stream that takes nothing: a full disk, or a reader that has gone.
class RefusingBuffer : public std::streambuf {
 protected:
  int overflow(int) override { return traits_type::eof(); }
};

TEST(Output, ARefusedStandardOutputIsAFailure) {
  const std::vector<Arguments> commands = {
      kLayer, join(kLayer, {"--json", "-"}), {"info"}, {"schedule"}, {"--help"}, {"--version"}};
  for (const Arguments& arguments : commands) {
    RefusingBuffer buffer;
    std::ostream out(&buffer);
    std::ostringstream err;
    EXPECT_EQ(cli::run_cli(arguments, out, err), 1);
    CommandResult result;
    result.err = err.str();
    EXPECT_TRUE(result.one_line_error()) << result.err;
    EXPECT_NE(result.err.find("standard output"), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace uniep::test
