#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "io/file.h"
#include "io/safetensors_writer.h"
#include "model/elementwise.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace uniep::io {
namespace {

using test::expect_error;
using test::TemporaryFolder;

std::string image(const std::string& header, const std::string& data) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i) & 0xff);
  return text + header + data;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

Safetensors parse(const std::string& text) {
  return parse_safetensors(std::as_bytes(std::span(text)), "s.st");
}

void expect_refused(const std::string& text, const std::string& problem) {
  SCOPED_TRACE(text.substr(std::min<std::size_t>(8, text.size())));
  expect_error(Status::kInvalidArgument, "safetensors file 's.st': ", [&] { parse(text); });
  expect_error(Status::kInvalidArgument, problem, [&] { parse(text); });
}

template <class Value>
std::span<const std::byte> bytes_of(const std::vector<Value>& values) {
  return std::as_bytes(std::span(values));
}

TEST(Safetensors, ReadsAnImage) {
  const std::string text =
      image("{" + entry("b", "F32", "[1,2]", "[4,12]") + ",\"__metadata__\":{\"format\":\"pt\",\"k\":\"\"}," +
                entry("a", "BF16", "[2]", "[0,4]") + "," + entry("none", "I64", "[0,7]", "[4,4]") + "," +
                entry("scalar", "I32", "[]", "[12,16]") + "}  ",
            std::string("\x80\x3f\x00\xc0"
                        "\x00\x00\x00\x3f\x01\x80\x80\x3f"
                        "\xfe\xff\xff\xff",
                        16));
  const Safetensors file = parse(text);
  EXPECT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_EQ(file.at("b").dtype, "F32");
  EXPECT_EQ(file.at("b").shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(file.at("none").elements(), 0);
  expect_error(Status::kInvalidArgument, "'s.st': there is no tensor 'c'", [&] { file.at("c"); });

  std::vector<float> a(2);
  file.read("a", 0, std::span(a));
  EXPECT_EQ(a, (std::vector<float>{1.0f, -2.0f}));
  std::vector<BFloat16> b(2);
  file.read("b", 0, std::span(b));
  EXPECT_EQ(b[0].bits, 0x3f00);
  EXPECT_EQ(b[1].bits, 0x3f81) << "0x3f808001 is above the middle of 0x3f80 and 0x3f81";
  std::vector<int64_t> scalar(1);
  file.read("scalar", 0, std::span(scalar));
  EXPECT_EQ(scalar[0], -2);
  file.read("none", 0, std::span<int64_t>());
}

TEST(Safetensors, Float32IsRoundedToNearestEven) {
  std::mt19937_64 random(3);
  std::vector<float> values = {0.0f, -0.0f};
  for (const uint32_t bits : {0x3f808000u, 0x3f818000u, 0x3f808001u, 0x3f807fffu, 0x7f7fffffu, 0x7f800000u, 0xff800000u,
                              0x7f800001u, 0x7fc00000u, 0x00000001u, 0x00008000u, 0x00018000u}) {
    values.push_back(float_from_bits(bits));
  }
  for (int i = 0; i < 1000; ++i) values.push_back(float_from_bits(static_cast<uint32_t>(random())));
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "f", {{"v", "F32", {static_cast<int64_t>(values.size())}}});
  writer.append(bytes_of(values));
  writer.commit();
  const Safetensors file = open_safetensors(folder / "f");
  std::vector<BFloat16> rounded(values.size());
  file.read("v", 0, std::span(rounded));
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(rounded[i].bits, to_bfloat16(values[i]).bits);
  EXPECT_EQ(rounded[2].bits, 0x3f80) << "a tie goes to the even neighbour";
  EXPECT_EQ(rounded[3].bits, 0x3f82) << "a tie goes to the even neighbour";
  EXPECT_EQ(rounded[6].bits, 0x7f80) << "the largest fp32 rounds to infinity";
  std::vector<float> exact(values.size());
  file.read("v", 0, std::span(exact));
  EXPECT_EQ(std::memcmp(exact.data(), values.data(), values.size() * 4), 0);
}

TEST(Safetensors, ReadsPiecesAndRefusesOthers) {
  const std::string text = image("{" + entry("a", "I32", "[3]", "[0,12]") + "," + entry("h", "F16", "[1]", "[12,14]") +
                                     "," + entry("q", "NEW7", "[9]", "[14,16]") + "}",
                                 std::string("\x01\0\0\0\x02\0\0\0\x03\0\0\0\0\0\0\0", 16));
  const Safetensors file = parse(text);
  int64_t pair[2];
  file.read("a", 1, std::span(pair));
  EXPECT_EQ(pair[0], 2);
  EXPECT_EQ(pair[1], 3);
  file.read("a", 3, std::span<int64_t>());
  for (const int64_t first : {int64_t{-1}, int64_t{2}, int64_t{4}, INT64_MAX, INT64_MIN}) {
    expect_error(Status::kInvalidArgument, "has 3 elements; asked for 2",
                 [&] { file.read("a", first, std::span(pair)); });
  }
  float value[1];
  expect_error(Status::kInvalidArgument, "'a' has dtype 'I32'; legal here: F32, BF16",
               [&] { file.read("a", 0, std::span(value)); });
  expect_error(Status::kInvalidArgument, "'h' has dtype 'F16'", [&] { file.read("h", 0, std::span(value)); });
  EXPECT_EQ(file.at("q").data.size(), 2u) << "an unknown dtype is listed";
  expect_error(Status::kInvalidArgument, "'q' has dtype 'NEW7'", [&] { file.read("q", 0, std::span(value)); });
}

TEST(Safetensors, RefusesBadHeaders) {
  const std::string good = entry("a", "U8", "[4]", "[0,4]");
  const auto refused = [](const std::string& header, const std::string& problem) {
    expect_refused(image(header, "1234"), problem);
  };
  expect_refused("", "shorter than the header's length");
  expect_refused("1234567", "shorter than the header's length");
  expect_refused(std::string(8, '\xff'), "the header's length is 18446744073709551615");
  expect_refused(std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10), "legal: up to 100000000");
  expect_refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), "should have 3 bytes, but 2 follow");
  expect_refused(std::string(8, '\0'), "does not begin with '{'");
  refused(" {" + good + "}", "does not begin with '{'");
  refused("\xef\xbb\xbf{" + good + "}", "does not begin with '{'");
  refused("[]", "does not begin with '{'");
  refused("{" + good, "not valid JSON");
  refused("{" + good + "}}", "not valid JSON");
  refused("{" + good + "}{}", "not valid JSON");
  refused("{" + good + ",}", "not valid JSON");
  refused("{" + good + "}" + std::string(1, '\0'), "not valid JSON");
  refused("{/* */" + good + "}", "not valid JSON");
  refused("{'a':1}", "not valid JSON");
  refused("{\"\xff\":1}", "not valid JSON");
  refused("{" + good + "," + good + "}", "the key 'a' stands twice");
  refused("{\"__metadata__\":{},\"__metadata__\":{}," + good + "}", "the key '__metadata__' stands twice");
  refused("{\"__metadata__\":{\"x\":\"1\",\"x\":\"1\"}," + good + "}", "the key 'x' stands twice");
  refused("{\"__metadata__\":{\"x\":1}," + good + "}", "a number in '__metadata__' at 'x'");
  refused("{\"__metadata__\":{\"x\":{}}," + good + "}", "an object in '__metadata__' at 'x'");
  refused("{\"__metadata__\":[]," + good + "}", "an array in '__metadata__'");
  refused("{\"a\":1}", "a number in 'a'");
  refused("{\"a\":\"x\"}", "a string in 'a'");
  refused("{\"a\":null}", "null in 'a'");
  refused("{\"a\":[]}", "an array in 'a'");
  refused("{\"a\":{}}", "'a' lacks one of dtype, shape and data_offsets");
  refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", "lacks one of");
  refused("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", "lacks one of");
  refused("{\"a\":{\"shape\":[4],\"data_offsets\":[0,4]}}", "lacks one of");
  refused("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "'dtype' stands twice");
  refused("{\"a\":{\"shape\":[4],\"shape\":[4]}}", "'shape' stands twice");
  refused("{\"a\":{\"data_offsets\":[0,4],\"data_offsets\":[0,4]}}", "'data_offsets' stands twice");
  refused("{\"a\":{\"extra\":1}}", "the unknown key 'extra' in 'a'");
  refused("{\"a\":{\"dtype\":[\"U8\"]}}", "an array in 'a' at 'dtype'");
  refused("{\"a\":{\"dtype\":4}}", "a number in 'a' at 'dtype'");
  refused("{\"a\":{\"shape\":4}}", "a number in 'a' at 'shape'");
  refused("{\"a\":{\"shape\":\"4\"}}", "a string in 'a' at 'shape'");
  refused("{\"a\":{\"shape\":{}}}", "an object in 'a' at 'shape'");
  refused("{\"a\":{\"shape\":[[4]]}}", "an array in 'a' at 'shape'");
  refused("{\"a\":{\"shape\":[\"4\"]}}", "a string in 'a' at 'shape'");
  refused("{\"a\":{\"shape\":[true]}}", "a boolean in 'a' at 'shape'");
  refused("{" + entry("a", "U8", "[-4]", "[0,4]") + "}", "a negative number in 'a' at 'shape'");
  refused("{" + entry("a", "U8", "[4.0]", "[0,4]") + "}", "a fraction");
  refused("{" + entry("a", "U8", "[18446744073709551616]", "[0,4]") + "}", "above 64 bits");
  refused("{" + entry("a", "U8", "[9223372036854775808]", "[0,4]") + "}", "above 63 bits");
  refused("{" + entry("a", "U8", "[4]", "[0]") + "}", "data_offsets must be two numbers");
  refused("{" + entry("a", "U8", "[4]", "[0,2,4]") + "}", "data_offsets must be two numbers");
  std::string many = "[1";
  for (int i = 0; i < 32; ++i) many += ",1";
  refused("{" + entry("a", "U8", many + "]", "[0,4]") + "}", "more than 32 numbers");
}

TEST(Safetensors, RefusesOffsetsThatDoNotTileTheData) {
  const auto refused = [](const std::string& entries, const std::string& problem) {
    expect_refused(image("{" + entries + "}", "12345678"), problem);
  };
  refused(entry("a", "U8", "[9]", "[0,9]"), "do not lie in the 8 bytes of data");
  refused(entry("a", "U8", "[1]", "[9223372036854775806,9223372036854775807]"), "do not lie in");
  refused(entry("a", "U8", "[4]", "[8,4]"), "do not lie in");
  refused(entry("a", "U8", "[8]", "[0,7]"), "data_offsets span 7 bytes");
  refused(entry("a", "F32", "[1]", "[0,8]"), "data_offsets span 8 bytes, but F32 [1] needs another size");
  refused(entry("a", "F64", "[2305843009213693953]", "[0,8]"), "needs another size");  // times 8 is 8 modulo 2^64
  refused(entry("a", "U8", "[4294967296,4294967296]", "[0,0]"), "overflows 63 bits");
  refused(entry("a", "U8", "[0,4294967296,4294967296]", "[0,0]"), "overflows 63 bits");
  refused(entry("a", "U8", "[7]", "[1,8]"), "leave a hole from byte 0");
  refused(entry("a", "U8", "[7]", "[0,7]"), "1 bytes at the end of the file belong to no tensor");
  refused("", "8 bytes at the end of the file belong to no tensor");
  refused(entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[5]", "[3,8]"),
          "'b': data_offsets [3, 8) overlap");
  refused(entry("a", "U8", "[8]", "[0,8]") + "," + entry("b", "U8", "[8]", "[0,8]"), "overlap");
  refused(entry("a", "U8", "[8]", "[0,8]") + "," + entry("b", "U8", "[0]", "[4,4]"), "overlap");
  refused(entry("b", "U8", "[3]", "[5,8]") + "," + entry("a", "U8", "[4]", "[0,4]"), "leave a hole from byte 4");
}

TEST(Safetensors, DamagedImagesAreReadOrRefused) {
  std::mt19937_64 random(17);
  const std::string good = image("{\"__metadata__\":{\"k\":\"v\"}," + entry("a", "F32", "[2,3]", "[0,24]") + "," +
                                     entry("b", "BF16", "[4]", "[24,32]") + "}",
                                 std::string(32, 'd'));
  const std::string tokens[] = {"{",   "}", "[", "]", ",", "\"", ":", "0", "9", "-", "\\u0000", "18446744073709551615",
                                "BF16"};
  EXPECT_EQ(parse(good).tensors().size(), 2u);
  int refused = 0;
  const auto check = [&](const std::string& text) {
    try {
      const Safetensors file = parse(text);
      for (const auto& [name, tensor] : file.tensors()) {
        if (tensor.dtype != "F32" && tensor.dtype != "BF16") continue;
        std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
        file.read(name, 0, std::span(values));
      }
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    }
  };
  for (std::size_t size = 0; size < good.size(); ++size) check(good.substr(0, size));
  EXPECT_EQ(refused, static_cast<int>(good.size()));
  refused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string damaged = good;
    for (auto edits = random() % 3 + 1; edits > 0; --edits) {
      const std::size_t place = random() % (damaged.size() - 32);
      if (random() % 2 == 0) {
        damaged[place] = static_cast<char>(random());
      } else {
        const std::string& token = tokens[random() % std::size(tokens)];
        damaged.replace(place, token.size(), token);
      }
    }
    check(damaged);
  }
  EXPECT_GT(refused, 10000);
}

TEST(SafetensorsWriter, WritesTheFormatsBytes) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "f", {{"z", "I32", {1}}, {"a", "U8", {}}}, {{"k", "v"}});
  const std::vector<int32_t> z = {258};
  writer.append(bytes_of(z));
  writer.append(std::as_bytes(std::span("!", 1)));
  EXPECT_FALSE(std::filesystem::exists(folder / "f"));
  writer.commit();
  std::string header = R"({"__metadata__":{"k":"v"},"z":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},)"
                       R"("a":{"dtype":"U8","shape":[],"data_offsets":[4,5]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(read_text_file(folder / "f"), image(header, std::string("\x02\x01\x00\x00!", 5)));
}

TEST(SafetensorsWriter, RandomFilesComeBack) {
  std::mt19937_64 random(29);
  const TemporaryFolder folder;
  const std::string dtypes[] = {"BF16", "F32", "I32", "I64", "F16", "U8"};
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<TensorSpec> specs(random() % 6);
    std::vector<std::string> data;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      specs[i] = {"tensor \"" + std::to_string(i) + "\"\n\xc3\xa9", dtypes[random() % std::size(dtypes)], {}};
      std::size_t size = *dtype_size(specs[i].dtype);
      for (auto dimensions = random() % 4; dimensions > 0; --dimensions) {
        specs[i].shape.push_back(static_cast<int64_t>(random() % 6));
        size *= static_cast<std::size_t>(specs[i].shape.back());
      }
      data.emplace_back(size, '\0');
      for (char& byte : data.back()) byte = static_cast<char>(random());
    }
    SafetensorsWriter writer(folder / "f", specs);
    std::string all;
    for (const std::string& piece : data) all += piece;
    for (std::size_t done = 0; done < all.size();) {  // pieces that do not care where a tensor ends
      const std::size_t size = std::min<std::size_t>(random() % 50, all.size() - done);
      writer.append(std::as_bytes(std::span(all).subspan(done, size)));
      done += size;
    }
    writer.commit();
    const Safetensors file = open_safetensors(folder / "f");
    ASSERT_EQ(file.tensors().size(), specs.size());
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const Tensor& tensor = file.at(specs[i].name);
      EXPECT_EQ(tensor.dtype, specs[i].dtype);
      EXPECT_EQ(tensor.shape, specs[i].shape);
      ASSERT_EQ(tensor.data.size(), data[i].size());
      EXPECT_TRUE(data[i].empty() || std::memcmp(tensor.data.data(), data[i].data(), data[i].size()) == 0);
    }
  }
}

TEST(SafetensorsWriter, RefusesWhatWouldNotBeRead) {
  const TemporaryFolder folder;
  const auto refused = [&](const std::vector<TensorSpec>& specs, const std::string& problem) {
    expect_error(Status::kInvalidArgument, problem, [&] { SafetensorsWriter(folder / "f", specs); });
  };
  refused({{"a", "F33", {1}}}, "unknown dtype 'F33'");
  refused({{"a", "F32", {-1}}}, "[-1] is not legal");
  refused({{"a", "F32", {int64_t{1} << 62}}}, "is not legal");
  refused({{"a", "U8", std::vector<int64_t>(33, 1)}}, "is not legal");
  refused({{"a", "U8", {INT64_MAX}}, {"b", "U8", {1}}}, "overflow 63 bits");
  refused({{"a", "U8", {1}}, {"a", "U8", {1}}}, "'a' is announced twice");
  refused({{"__metadata__", "U8", {1}}}, "can not have the name");
  refused({{"\xff", "U8", {1}}}, "not valid UTF-8");
  {
    SafetensorsWriter writer(folder / "f", {{"a", "U8", {4}}});
    writer.append(std::as_bytes(std::span("123", 3)));
    expect_error(Status::kInvalidArgument, "1 bytes of the announced tensors are missing", [&] { writer.commit(); });
    expect_error(Status::kInvalidArgument, "2 bytes appended where 1",
                 [&] { writer.append(std::as_bytes(std::span("45", 2))); });
  }
  EXPECT_EQ(folder.entries(), 0u) << "nothing is left without commit()";
  expect_error(Status::kIo, "/dev/full", [] { SafetensorsWriter("/dev/full", {{"a", "U8", {4}}}); });
}

TEST(Safetensors, MapsFilesLargerThanTheMemoryThatIsRead) {
  // A sparse file of 6 GiB: a header, then a hole that occupies no blocks.
  const TemporaryFolder folder;
  constexpr int64_t kElements = int64_t{3} << 30;
  const std::string header =
      "{" + entry("w", "BF16", "[" + std::to_string(kElements) + "]", "[0," + std::to_string(2 * kElements) + "]") +
      "}";
  write_file(folder / "f", image(header, ""));
  const std::size_t begin = 8 + header.size();
  std::error_code error;
  std::filesystem::resize_file(folder / "f", begin + 2 * kElements, error);
  ASSERT_FALSE(error) << error.message();
  const Safetensors file = open_safetensors(folder / "f");
  EXPECT_EQ(file.at("w").elements(), kElements);
  BFloat16 last[2] = {{1}, {1}};
  file.read("w", kElements - 2, std::span(last));
  EXPECT_EQ(last[0].bits, 0);
  EXPECT_EQ(last[1].bits, 0);
}

TEST(Safetensors, NamesTheFile) {
  const TemporaryFolder folder;
  write_file(folder / "bad.st", "short");
  expect_error(Status::kInvalidArgument, "bad.st': truncated", [&] { open_safetensors(folder / "bad.st"); });
  expect_error(Status::kIo, "gone.st", [&] { open_safetensors(folder / "gone.st"); });
}

}  // namespace
}  // namespace uniep::io
