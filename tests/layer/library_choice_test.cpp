#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "engine/cuda/runtime/dynamic_library.h"
#include "support/c_layer.h"
#include "uniep/error.h"

// Which file is opened as NCCL or NVRTC. Files that any machine has stand in for them.
namespace uniep::test {
namespace {

constexpr const char* kMath = "libm.so.6";
constexpr const char* kNowhere = "libuniep_is_not_here.so";

cuda::DynamicLibrary open_as(const char* library) {
  return cuda::DynamicLibrary("a library for tests", "UNIEP_LIBTEST", {"libuniep_has_no_such_name.so"}, library);
}

bool has_cbrt(const cuda::DynamicLibrary& library) {
  double (*function)(double) = nullptr;
  try {
    library.bind(function, "cbrt");
    return true;
  } catch (const Error&) {
    return false;
  }
}

// A process has one of each, so that this is one story.
TEST(LibraryChoice, IsMadeBeforeTheFirstUse) {
  expect_ok(uniep_use_library("nccl", kNowhere));
  expect_ok(uniep_use_library("nccl", kMath));  // nobody has used it yet
  EXPECT_TRUE(has_cbrt(open_as("nccl")));
  expect_failure(UNIEP_INVALID_ARGUMENT, "path: 'libuniep_is_not_here.so' for nccl, which is in use from /",
                 uniep_use_library("nccl", kNowhere));
  const std::string message = uniep_last_error();
  const std::size_t begin = message.find("from /") + 5;
  const std::string file = message.substr(begin, message.find(';') - begin);
  ASSERT_TRUE(std::filesystem::exists(file)) << message;
  expect_ok(uniep_use_library("nccl", file.c_str()));  // the same file

  ASSERT_EQ(setenv("UNIEP_LIBTEST", "libc.so.6", 1), 0);
  EXPECT_FALSE(has_cbrt(open_as("nccl")));  // the environment goes before
  ASSERT_EQ(unsetenv("UNIEP_LIBTEST"), 0);

  const cuda::DynamicLibrary missing = open_as("nvrtc");
  void (*function)() = nullptr;
  EXPECT_THROW(missing.bind(function, "cbrt"), Error);
  expect_failure(UNIEP_INVALID_ARGUMENT, "no file, since none was found", uniep_use_library("nvrtc", kMath));
}

TEST(LibraryChoice, WrongArguments) {
  expect_failure(UNIEP_INVALID_ARGUMENT, "library: 'cuda'; legal are nccl and nvrtc", uniep_use_library("cuda", kMath));
  expect_failure(UNIEP_INVALID_ARGUMENT, "path: empty", uniep_use_library("nccl", ""));
  expect_failure(UNIEP_INVALID_ARGUMENT, "library: null pointer", uniep_use_library(nullptr, kMath));
  expect_failure(UNIEP_INVALID_ARGUMENT, "path: null pointer", uniep_use_library("nccl", nullptr));
}

}  // namespace
}  // namespace uniep::test
