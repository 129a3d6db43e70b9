#include "io/npy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

#include "io/file.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace {
std::atomic<std::size_t> largest_allocation{0};
}

// Every allocation of this program is seen, so that a test can say how much a hostile file makes the reader ask for.
// Not inlined: gcc would take malloc and free for mismatched with new and delete.
__attribute__((noinline)) void* operator new(std::size_t size) {
  std::size_t seen = largest_allocation.load();
  while (size > seen && !largest_allocation.compare_exchange_weak(seen, size)) {
  }
  if (void* memory = std::malloc(size > 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace uniep::io {
namespace {

using test::expect_error;
using test::TemporaryFolder;

std::string image(const std::string& header, const std::string& data, int major = 1, int minor = 0) {
  std::string text = "\x93NUMPY";
  text += static_cast<char>(major);
  text += static_cast<char>(minor);
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) text += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return text + header + data;
}

template <class Value>
std::string bytes_of(const std::vector<Value>& values) {
  std::string text(values.size() * sizeof(Value), '\0');
  if (!values.empty()) std::memcpy(text.data(), values.data(), text.size());
  return text;
}

std::string header_of(const std::string& type, const std::string& shape, const std::string& fortran = "False") {
  return "{'descr': '" + type + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }   \n";
}

NpyArray parse(const std::string& text) {
  return parse_npy(std::as_bytes(std::span(text)), "some.npy");
}

void expect_refused(const std::string& text, const std::string& problem) {
  SCOPED_TRACE(problem);
  expect_error(Status::kInvalidArgument, "npy file 'some.npy': ", [&] { parse(text); });
  expect_error(Status::kInvalidArgument, problem, [&] { parse(text); });
}

TEST(Npy, ReadsEveryVersionAndType) {
  const std::vector<int32_t> small = {1, -1, 2147483647, 0, 5, 6};
  const std::vector<int64_t> big = {1, -1, int64_t{1} << 62, 0, 5, 6};
  const std::vector<float> real = {0.5f, -0.0f, 1e-45f, 3e38f, 1.0f, 2.0f};
  for (const int version : {1, 2, 3}) {
    EXPECT_EQ(std::get<0>(parse(image(header_of("<i4", "(2, 3)"), bytes_of(small), version)).values), small);
    EXPECT_EQ(std::get<1>(parse(image(header_of("<i8", "(2, 3)"), bytes_of(big), version)).values), big);
    const NpyArray array = parse(image(header_of("<f4", "(2, 3)"), bytes_of(real), version));
    EXPECT_EQ(bytes_of(std::get<2>(array.values)), bytes_of(real));
    EXPECT_EQ(array.shape, (std::vector<int64_t>{2, 3}));
  }
}

TEST(Npy, ReadsEveryLegalSpellingOfTheHeader) {
  const std::vector<int32_t> six = {1, 2, 3, 4, 5, 6};
  for (const std::string header : {
           "{\"shape\":(6,),\"fortran_order\":False,\"descr\":\"<i4\"}",
           "  { 'fortran_order' : False , 'shape' : ( 6 , ) , 'descr' : '<i4' }",
           "{'descr':'<i4','fortran_order':False,'shape':(6,)}\n",
           "{'descr':'<i4','fortran_order':False,'shape':(6,),}",
       }) {
    const NpyArray array = parse(image(header, bytes_of(six)));
    EXPECT_EQ(array.shape, (std::vector<int64_t>{6}));
    EXPECT_EQ(std::get<0>(array.values), six);
  }
  EXPECT_EQ(parse(image(header_of("<i4", "(1,2,3)"), bytes_of(six))).shape, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(parse(image(header_of("<i4", "()"), bytes_of(std::vector<int32_t>{9}))).shape, (std::vector<int64_t>{}));
  const NpyArray empty = parse(image(header_of("<f4", "(0, 8)"), ""));
  EXPECT_EQ(empty.shape, (std::vector<int64_t>{0, 8}));
  EXPECT_TRUE(std::get<2>(empty.values).empty());
}

TEST(Npy, RefusesOtherTypesByName) {
  expect_refused(image(header_of(">i4", "(1,)"), "1234"), "dtype '>i4' is big endian; legal: '<i4', '<i8', '<f4'");
  for (const std::string type : {"<f8", "<f2", "|b1", "<u4", "i4", "", "<i4 ", "=i4", "<M8[ns]"}) {
    expect_refused(image(header_of(type, "(1,)"), "1234"), "dtype '" + type + "' is not supported; legal: '<i4'");
  }
  expect_refused(image(header_of("<i4", "(1,)", "True"), "1234"), "Fortran order is not supported");
  expect_refused(image("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1,)}", "1234"),
                 "structured dtypes");
}

TEST(Npy, RefusesBadBeginnings) {
  expect_refused("", "magic");
  expect_refused("\x93NUMPY\x01", "magic");
  expect_refused(std::string("\x93NUMPZ\x01\x00\x02\x00{}", 12), "magic");
  const std::string header = header_of("<i4", "(1,)");
  expect_refused(image(header, "1234", 4), "format version 4.0 is not known");
  expect_refused(image(header, "1234", 0), "format version 0.0 is not known");
  expect_refused(image(header, "1234", 1, 1), "format version 1.1 is not known");
  expect_refused(std::string("\x93NUMPY\x01\x00\x02", 9), "inside the header's length");
  expect_refused(std::string("\x93NUMPY\x02\x00\x02\x00\x00", 11), "inside the header's length");
  expect_refused(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{}", 14), "should have 4294967295 bytes, but 2 follow");
}

TEST(Npy, RefusesBadHeaders) {
  const auto refused = [](const std::string& header, const std::string& problem) {
    SCOPED_TRACE(header);
    expect_refused(image(header, "1234"), problem);
  };
  const std::string type = "'descr': '<i4', ", order = "'fortran_order': False, ", shape = "'shape': (1,), ";
  refused("", "expected '{'");
  refused("{", "expected");
  refused("{}", "is missing");
  refused("{" + type + order + "}", "is missing");
  refused("{" + type + shape + "}", "is missing");
  refused("{" + order + shape + "}", "is missing");
  refused("{" + type + order + shape + type + "}", "'descr' stands there twice");
  refused("{" + type + order + shape + order + "}", "'fortran_order' stands there twice");
  refused("{" + type + order + shape + shape + "}", "'shape' stands there twice");
  refused("{" + type + order + shape + "'extra': 1}", "unknown key 'extra'");
  refused("{" + type + order + shape + "} x", "after the closing brace");
  refused("{" + type + order + shape + "}{}", "after the closing brace");
  refused("{" + type + order + shape + "}" + std::string(1, '\0'), "after the closing brace");
  refused("{" + type + order + shape, "expected");
  refused("{" + type + order + shape + ",}", "expected");
  refused("{'descr' '<i4'}", "expected ':'");
  refused("{'descr': <i4}", "expected '\"'");
  refused("{'descr': '<i4}", "expected '''");
  refused("{'descr': \"<i4'}", "expected '\"'");
  refused("{'descr': '\\x3ci4'}", "without escapes");
  refused("{'des\ncr': '<i4'}", "printable ASCII");
  refused("{'descr': '\xc3\xa9'}", "printable ASCII");
  refused("{'fortran_order': 0}", "must be True or False");
  refused("{'fortran_order': None}", "must be True or False");
  refused("{'fortran_order': Falsehood}", "expected '}'");
}

TEST(Npy, RefusesBadShapes) {
  const auto refused = [](const std::string& shape, const std::string& problem) {
    SCOPED_TRACE(shape);
    expect_refused(image(header_of("<i4", shape), "1234"), problem);
  };
  refused("1", "expected '('");
  refused("(1)", "needs a comma");
  refused("(-1,)", "must not be negative");
  refused("(1, -4)", "must not be negative");
  refused("(+1,)", "decimal number");
  refused("(1L,)", "needs a comma");
  refused("(1.0,)", "needs a comma");
  refused("(0x1,)", "needs a comma");
  refused("(01,)", "begin with 0");
  refused("(,)", "decimal number");
  refused("(1,,)", "decimal number");
  refused("(True,)", "decimal number");
  refused("[1]", "expected '('");
  refused("(1, 2", "decimal number");
  refused("(1,", "decimal number");
  refused("(9223372036854775808,)", "does not fit into 63 bits");
  refused("(99999999999999999999999999999,)", "does not fit into 63 bits");
  refused("(9223372036854775807, 2)", "more elements than 63 bits can count");
  refused("(0, 9223372036854775807, 3)", "more elements than 63 bits can count");
  refused("(4294967296, 4294967296, 4)", "more elements than 63 bits can count");
  refused("(9223372036854775807,)", "truncated");
  refused("(4611686018427387905,)", "truncated");  // times 4 bytes is 4 modulo 2^64
  std::string many = "(";
  for (int i = 0; i < 33; ++i) many += "1,";
  refused(many + ")", "more than 32 dimensions");
}

TEST(Npy, RefusesTooFewAndTooManyBytes) {
  expect_refused(image(header_of("<i4", "(2, 3)"), std::string(23, 'x')),
                 "truncated: the shape [2, 3] needs 6 elements");
  expect_refused(image(header_of("<i4", "(2, 3)"), std::string(20, 'x')), "truncated");
  expect_refused(image(header_of("<i4", "(2, 3)"), std::string(25, 'x')), "1 bytes too many");
  expect_refused(image(header_of("<i4", "(2, 3)"), std::string(28, 'x')), "4 bytes too many");
  expect_refused(image(header_of("<i8", "(0,)"), "x"), "1 bytes too many");
}

// Every prefix and thousands of damaged copies of good images: an array or one clear error, and never a request for
// more memory than the image has (small ones aside: messages).
TEST(Npy, DamagedImagesAreReadOrRefused) {
  constexpr std::size_t kMessages = 1024;
  std::mt19937_64 random(11);
  const std::vector<float> values(100, 1.5f);
  const std::string good[] = {image(header_of("<f4", "(10, 10)"), bytes_of(values)),
                              image(header_of("<i8", "(5, 10, 1)"), bytes_of(values), 2),
                              image(header_of("<i4", "(100,)"), bytes_of(values), 3)};
  const std::string tokens[] = {"(", ")", ",", "'", "{", "}", "0", "9", "-", "<i8", "99999999999999", "\xff", ">", ":"};
  int refused = 0;
  const auto check = [&](const std::string& text) {
    largest_allocation = 0;
    try {
      parse(text);
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
    }
    EXPECT_LE(largest_allocation.load(), text.size() + kMessages) << text;
  };
  for (const std::string& text : good) {
    for (std::size_t size = 0; size < text.size(); ++size) check(text.substr(0, size));
    EXPECT_EQ(refused, static_cast<int>(text.size()));
    refused = 0;
    for (int trial = 0; trial < 20000; ++trial) {
      std::string damaged = text;
      const std::size_t header_end = std::min<std::size_t>(damaged.size(), 96);
      for (auto edits = random() % 3 + 1; edits > 0; --edits) {
        const std::size_t place = random() % header_end;
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
    refused = 0;
  }
}

TEST(Npy, WritesWhatItReads) {
  const TemporaryFolder folder;
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 60; ++trial) {
    NpyArray array;
    std::size_t count = 1;
    for (auto dimensions = random() % 5; dimensions > 0; --dimensions) {
      array.shape.push_back(static_cast<int64_t>(random() % 5));
      count *= static_cast<std::size_t>(array.shape.back());
    }
    if (trial % 3 == 0) array.values = std::vector<int32_t>(count);
    if (trial % 3 == 1) array.values = std::vector<int64_t>(count);
    if (trial % 3 == 2) array.values = std::vector<float>(count);
    std::visit(
        [&](auto& values) {
          for (auto& value : values) {
            const uint64_t bits = random();
            std::memcpy(&value, &bits, sizeof value);
          }
        },
        array.values);
    write_npy(folder / "a.npy", array);
    const NpyArray again = read_npy(folder / "a.npy");
    EXPECT_EQ(again.shape, array.shape);
    ASSERT_EQ(again.values.index(), array.values.index());
    std::visit(
        [&](const auto& values) {
          EXPECT_EQ(bytes_of(values), bytes_of(std::get<std::decay_t<decltype(values)>>(again.values)));
        },
        array.values);
    EXPECT_EQ(read_file(folder / "a.npy").size() % 64, count * (trial % 3 == 1 ? 8 : 4) % 64) << "data are aligned";
  }
}

TEST(Npy, WritesTheFormatsBytes) {
  const TemporaryFolder folder;
  write_npy(folder / "a.npy", NpyArray{{2, 1}, std::vector<int32_t>{258, -1}});
  std::string expected("\x93NUMPY\x01\x00\x76\x00", 10);
  expected += "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1, ), }";
  expected.append(127 - expected.size(), ' ');
  expected += std::string("\n\x02\x01\x00\x00\xff\xff\xff\xff", 9);
  EXPECT_EQ(read_text_file(folder / "a.npy"), expected);
}

TEST(Npy, WriterRefusesAShapeThatDoesNotFit) {
  const TemporaryFolder folder;
  const auto write = [&](std::vector<int64_t> shape) {
    write_npy(folder / "a.npy", NpyArray{std::move(shape), std::vector<float>(6)});
  };
  expect_error(Status::kInvalidArgument, "[5] does not fit 6 values", [&] { write({5}); });
  expect_error(Status::kInvalidArgument, "does not fit", [&] { write({-2, -3}); });
  expect_error(Status::kInvalidArgument, "does not fit", [&] { write(std::vector<int64_t>(33, 1)); });
  expect_error(Status::kIo, "/dev/full", [] { write_npy("/dev/full", NpyArray{{1}, std::vector<float>(1)}); });
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(Npy, NamesTheFile) {
  const TemporaryFolder folder;
  write_file(folder / "bad.npy", "not an array");
  expect_error(Status::kInvalidArgument, "bad.npy': it does not begin", [&] { read_npy(folder / "bad.npy"); });
  expect_error(Status::kIo, "gone.npy", [&] { read_npy(folder / "gone.npy"); });
}

}  // namespace
}  // namespace uniep::io
