#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <thread>

#include "io/quote.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace uniep::io {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

TEST(ReadFile, ReadsBytesOfAnySize) {
  const TemporaryFolder folder;
  for (const std::size_t size : {0, 1, 65535, 65536, 65537, 300000}) {
    std::string text(size, '\0');
    for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 7 + size);
    write_file(folder / "data", text);
    EXPECT_EQ(read_text_file(folder / "data"), text);
    const std::vector<std::byte> bytes = read_file(folder / "data");
    ASSERT_EQ(bytes.size(), size);
    EXPECT_TRUE(size == 0 || std::memcmp(bytes.data(), text.data(), size) == 0);
  }
}

TEST(ReadFile, ReadsFilesThatClaimToBeEmptyAndPipes) {
  EXPECT_NE(read_text_file("/proc/self/status").find("Name:"), std::string::npos);
  const TemporaryFolder folder;
  const fs::path pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string text(200000, 'p');
  std::thread writer([&] { write_file(pipe, text); });
  EXPECT_EQ(read_text_file(pipe), text);
  writer.join();
}

TEST(ReadFile, NamesFileAndReason) {
  const TemporaryFolder folder;
  const std::string missing = (folder / "missing").native();
  expect_error(Status::kIo, missing + "': No such file", [&] { read_file(missing); });
  expect_error(Status::kIo, missing + "': No such file", [&] { MappedFile{missing}; });
  expect_error(Status::kIo, "it is a directory", [&] { read_file(folder.path()); });
  expect_error(Status::kIo, "it is a directory", [&] { MappedFile{folder.path()}; });
  expect_error(Status::kIo, "not a regular file", [&] { MappedFile{"/dev/null"}; });
  expect_error(Status::kIo, "No such file", [&] { read_file(""); });
  expect_error(Status::kIo, "a\\x0ab", [&] { read_file(folder / "a\nb"); });
  // Opens, but can not be read at its beginning.
  expect_error(Status::kIo, "/proc/self/mem", [&] { read_file("/proc/self/mem"); });
  if (::geteuid() != 0) {
    write_file(folder / "secret", "x");
    fs::permissions(folder / "secret", fs::perms::none);
    expect_error(Status::kIo, "Permission denied", [&] { read_file(folder / "secret"); });
  }
}

TEST(MappedFile, ShowsTheBytes) {
  const TemporaryFolder folder;
  write_file(folder / "data", "mapped");
  const MappedFile file(folder / "data");
  ASSERT_EQ(file.bytes().size(), 6u);
  EXPECT_EQ(std::memcmp(file.bytes().data(), "mapped", 6), 0);
  write_file(folder / "empty", "");
  EXPECT_TRUE(MappedFile(folder / "empty").bytes().empty());
}

TEST(AtomicFile, AppearsWithCommitOnly) {
  const TemporaryFolder folder;
  const fs::path path = folder / "out";
  {
    AtomicFile file(path);
    file.write("half");
    EXPECT_FALSE(fs::exists(path));
  }
  EXPECT_EQ(folder.entries(), 0u);
  AtomicFile file(path);
  file.write("first ");
  file.write(std::as_bytes(std::span("second", 6)));
  file.commit();
  EXPECT_EQ(read_text_file(path), "first second");
  EXPECT_EQ(folder.entries(), 1u);
  expect_error(Status::kIo, "committed before", [&] { file.write("more"); });
  expect_error(Status::kIo, "committed before", [&] { file.commit(); });
  EXPECT_EQ(read_text_file(path), "first second");
}

TEST(AtomicFile, ReplacesAndKeepsPermissions) {
  const TemporaryFolder folder;
  const fs::path path = folder / "out";
  write_file(path, "old and longer");
  fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  {
    AtomicFile file(path);
    file.write("new");
    EXPECT_EQ(read_text_file(path), "old and longer");
    file.commit();
  }
  EXPECT_EQ(read_text_file(path), "new");
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST(AtomicFile, TwoWritersOfOnePathDoNotMix) {
  const TemporaryFolder folder;
  AtomicFile first(folder / "out");
  AtomicFile second(folder / "out");
  first.write("aaaa");
  second.write("bb");
  second.commit();
  EXPECT_EQ(read_text_file(folder / "out"), "bb");
  first.commit();
  EXPECT_EQ(read_text_file(folder / "out"), "aaaa");
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(AtomicFile, FollowsSymbolicLinks) {
  const TemporaryFolder folder;
  write_file(folder / "target", "old");
  fs::create_symlink("target", folder / "link");
  write_file(folder / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_text_file(folder / "target"), "new");
  fs::create_symlink("nowhere", folder / "dangling");
  expect_error(Status::kIo, "symbolic link to nothing", [&] { AtomicFile{folder / "dangling"}; });
}

TEST(AtomicFile, RefusesPathsThatCanNotBeWritten) {
  const TemporaryFolder folder;
  expect_error(Status::kIo, "directory", [&] { AtomicFile{folder.path()}; });
  expect_error(Status::kIo, "No such file", [&] { AtomicFile{""}; });
  expect_error(Status::kIo, "no file can be made in", [&] { AtomicFile{folder / "missing/out"}; });
  expect_error(Status::kIo, "directory", [&] { AtomicFile{folder.path() / "new/"}; });
  write_file(folder / "plain", "x");
  expect_error(Status::kIo, "Not a directory", [&] { AtomicFile{folder / "plain/out"}; });
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(AtomicFile, FailedRenameLeavesNothing) {
  const TemporaryFolder folder;
  const fs::path path = folder / "out";
  AtomicFile file(path);
  file.write("text");
  fs::create_directory(path);  // a file can not replace a folder
  expect_error(Status::kIo, path.native(), [&] { file.commit(); });
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(AtomicFile, ASignalLeavesNoTemporary) {
  const TemporaryFolder folder;
  write_file(folder / "out", "old");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (const int reset : {SIGINT, SIGTERM, SIGHUP}) std::signal(reset, SIG_DFL);
      remove_temporaries_at_signals();
      AtomicFile first(folder / "out"), second(folder / "new");
      first.write("half");
      { const AtomicFile given_up(folder / "third"); }
      ::raise(signal);
      ::_exit(0);
    }
    ASSERT_GT(child, 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    EXPECT_EQ(folder.entries(), 1u);
    EXPECT_EQ(read_text_file(folder / "out"), "old");
  }
}

void (*wrapped)(int) = nullptr;

// As NVRTC does: a handler in front of another, which it calls, and which stays.
void in_front(int signal) {
  wrapped(signal);
}

TEST(AtomicFile, SignalEndsAProcessWhoseHandlerIsWrapped) {
  const TemporaryFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);  // its signal is another one
    std::signal(SIGTERM, SIG_DFL);
    remove_temporaries_at_signals();
    AtomicFile file(folder / "out");
    file.write("half");
    struct sigaction action {};
    action.sa_handler = in_front;
    struct sigaction before {};
    ::sigaction(SIGTERM, &action, &before);
    wrapped = before.sa_handler;
    ::raise(SIGTERM);
    ::_exit(0);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(AtomicFile, FullDeviceIsAnError) {
  expect_error(Status::kIo, "'/dev/full': No space left on device", [] { write_file("/dev/full", "text"); });
  AtomicFile file("/dev/full");
  expect_error(Status::kIo, "/dev/full", [&] { file.write("text"); });
  expect_error(Status::kIo, "earlier write", [&] { file.commit(); });
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  write_file("/dev/null", "text");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST(AtomicFile, BrokenPipeIsAnError) {
  const auto previous = std::signal(SIGPIPE, SIG_IGN);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  {
    AtomicFile file("/dev/fd/" + std::to_string(ends[1]));
    file.write("seen");
    char text[4];
    EXPECT_EQ(::read(ends[0], text, 4), 4);
    EXPECT_EQ(std::memcmp(text, "seen", 4), 0);
    ::close(ends[0]);
    expect_error(Status::kIo, "Broken pipe", [&] { file.write("lost"); });
  }
  ::close(ends[1]);
  std::signal(SIGPIPE, previous);
}

TEST(AtomicFile, WritesThroughADescriptorThatIsARegularFile) {
  const TemporaryFolder folder;
  const fs::path path = folder / "redirected";
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_GE(descriptor, 0);
  write_file("/dev/fd/" + std::to_string(descriptor), "text");
  struct stat by_name {
  }, by_descriptor{};
  ASSERT_EQ(::stat(path.c_str(), &by_name), 0);
  ASSERT_EQ(::fstat(descriptor, &by_descriptor), 0);
  EXPECT_EQ(by_name.st_ino, by_descriptor.st_ino);
  EXPECT_EQ(read_text_file(path), "text");
  ::close(descriptor);
}

TEST(QuoteText, IsOnePrintableLineOfBoundedLength) {
  EXPECT_EQ(quote_text("plain 'text'"), "'plain 'text''");
  EXPECT_EQ(quote_text(std::string_view("a\n\0\x7f\xc3\xa9", 6)), "'a\\x0a\\x00\\x7f\\xc3\\xa9'");
  EXPECT_EQ(quote_text("12345", 5), "'12345'");
  EXPECT_EQ(quote_text("123456", 5), "'12345...'");
}

}  // namespace
}  // namespace uniep::io
