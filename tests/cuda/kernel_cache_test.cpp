// The disk cache of compiled kernels: damaged, short and foreign files count as absent; processes may share a folder; a
// folder that can not be written and a full disk do no harm; folders and files that others may write are refused; the
// key changes with options. And what the compiler's log says is read.
#include "engine/cuda/runtime/kernel_cache.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "uniep/error.h"

namespace {

using namespace uniep::cuda;
namespace fs = std::filesystem;

int failures = 0;

void expect(bool good, const char* name) {
  std::printf("%-4s %s\n", good ? "ok" : "FAIL", name);
  failures += good ? 0 : 1;
}

bool holds(const KernelCache& cache, const std::string& key, const std::string& content) {
  std::string found;
  return cache.load(key, found) && found == content;
}

void check_files(const std::string& folder) {
  const KernelCache cache(folder);
  const std::string content(5000, 'x');
  std::string found;
  expect(!cache.load("a", found), "an empty cache has nothing");
  cache.store("a", content);
  expect(holds(cache, "a", content), "what was stored is found");
  fs::copy_file(cache.path("a"), cache.path("b"));
  expect(!cache.load("b", found), "a file under another key is refused");
  fs::resize_file(cache.path("a"), 3000);
  expect(!cache.load("a", found), "a short file is refused");
  cache.store("a", content);
  {
    std::fstream file(cache.path("a"), std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(2000);
    file.put('y');
  }
  expect(!cache.load("a", found), "a damaged file is refused");
  cache.store("a", content);
  expect(holds(cache, "a", content), "and is replaced");
  std::ofstream(cache.path("c"), std::ios::binary) << "UNIEPK00 of another version";
  expect(!cache.load("c", found), "another format is refused");
  const KernelCache nowhere("/proc/no/such/folder");
  nowhere.store("a", content);
  expect(!nowhere.load("a", found), "a folder that can not be written does no harm");
}

std::string refusal(const KernelCache& cache, const std::string& key) {
  try {
    std::string found;
    cache.load(key, found);
    return "";
  } catch (const uniep::Error& error) {
    return error.what();
  }
}

// Code that others could have put there is not run.
// As files that were written, and used last, so many days ago.
void make_old(const std::string& path, double written, double used) {
  const auto ago = [](double days) { return timespec{::time(nullptr) - static_cast<time_t>(days * 86400), 0}; };
  const timespec times[2] = {ago(used), ago(written)};
  expect(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0, "a file can be made old");
}

void check_stale_files(const std::string& folder) {
  const KernelCache cache(folder, KernelCache::Stale::kGo);
  const auto key = [](char digit) { return std::string(32, digit); };
  for (const char digit : {'1', '2', '3', '4'}) cache.store(key(digit), "content");
  const std::string aside = ".0123456789abcdef.new";
  const std::string begun = cache.path(key('a')) + aside, left = cache.path(key('b')) + aside;
  const std::string others[] = {folder + "/notes.txt", folder + "/fmha_sm90.cubin",
                                folder + "/" + std::string(33, 'c') + ".cubin", cache.path(key('d')) + ".old.new"};
  for (const std::string& path : {begun, left}) std::ofstream(path) << "x";
  for (const std::string& path : others) {
    std::ofstream(path) << "x";
    make_old(path, 1000, 1000);
  }
  make_old(cache.path(key('1')), 91, 91);
  make_old(cache.path(key('2')), 91, 91);
  make_old(cache.path(key('3')), 91, 2);
  make_old(left, 0.1, 0.1);
  expect(holds(cache, key('2'), "content"), "an old kernel is loaded");
  const KernelCache named(folder);
  named.store(key('5'), "content");
  expect(fs::exists(cache.path(key('1'))) && fs::exists(left), "a folder that was named keeps what it has");
  cache.store(key('6'), "content");
  expect(!fs::exists(cache.path(key('1'))), "a kernel that nobody has loaded for 90 days goes");
  expect(holds(cache, key('2'), "content"), "one that was loaded stays");
  expect(fs::exists(cache.path(key('3'))), "one that another user has loaded, too");
  expect(holds(cache, key('4'), "content") && holds(cache, key('6'), "content"), "and so do new ones");
  expect(!fs::exists(left) && fs::exists(begun), "what is half-written goes after an hour");
  for (const std::string& path : others) expect(fs::exists(path), "other files stay");
}

void check_trust(const std::string& folder) {
  const mode_t before = ::umask(0);
  const KernelCache cache(folder);
  cache.store("mine", "content");
  ::umask(before);
  expect(holds(cache, "mine", "content"), "a cache made under umask 0 is nobody else's to write");
  const auto refused = [&](const std::string& path, const char* mode, const char* name) {
    const std::string text = refusal(cache, "mine");
    expect(text.find("UNIEP_CACHE_DIR: others may write '" + path + "'") == 0 && text.find(mode) != std::string::npos,
           name);
  };
  for (const auto& [path, mode] : {std::pair{folder, 0755u}, {cache.path("mine"), 0644u}}) {
    for (const unsigned write : {0020u, 0002u}) {
      ::chmod(path.c_str(), mode | write);
      char text[16];
      std::snprintf(text, sizeof(text), "mode %04o)", mode | write);
      refused(path, text, path == folder ? "a folder that others may write is refused" : "and such a file");
      if (path == folder) {
        bool told = false;
        try {
          cache.store("other", "content");
        } catch (const uniep::Error&) {
          told = true;
        }
        expect(told && !fs::exists(cache.path("other")), "nothing is stored there");
      }
    }
    ::chmod(path.c_str(), mode);
    expect(holds(cache, "mine", "content"), "and taken again when only this user may");
    if (::geteuid() != 0) {
      std::printf("not tested: another owner (only root can give files away)\n");
      continue;
    }
    const bool given = ::chown(path.c_str(), 12345, static_cast<gid_t>(-1)) == 0;
    if (given) refused(path, "(user 12345, ", "another user's is refused");
    expect(given && ::chown(path.c_str(), 0, static_cast<gid_t>(-1)) == 0, "files can be given away and back");
  }
  fs::rename(cache.path("mine"), folder + "/elsewhere");
  fs::create_symlink(folder + "/elsewhere", cache.path("mine"));
  std::string found;
  expect(!cache.load("mine", found), "a link counts as absent");
}

// The default folder of a home that users share, which nobody has named: kernels are compiled, and one line says why.
void check_default_folder(const std::string& home) {
  fs::create_directories(home);
  const std::string messages = home + "/stderr";
  const pid_t child = fork();
  if (child == 0) {
    ::setenv("XDG_CACHE_HOME", home.c_str(), 1);
    ::unsetenv("UNIEP_CACHE_DIR");
    const int file = ::open(messages.c_str(), O_WRONLY | O_CREAT, 0600);
    if (file < 0 || ::dup2(file, STDERR_FILENO) < 0) _exit(2);
    const KernelCache cache;
    cache.store("mine", "content");
    if (!holds(cache, "mine", "content")) _exit(3);
    ::chmod(cache.directory().c_str(), 0777);
    std::string found;
    bool absent = !cache.load("mine", found);
    cache.store("other", "content");
    absent = absent && !fs::exists(cache.path("other")) && !KernelCache().load("mine", found);
    if (!absent) _exit(4);
    ::chmod(cache.directory().c_str(), 0755);
    ::chmod(cache.path("mine").c_str(), 0666);
    if (cache.load("mine", found)) _exit(5);
    cache.store("mine", "again");
    if (!holds(cache, "mine", "again")) _exit(6);
    ::setenv("UNIEP_CACHE_DIR", cache.directory().c_str(), 1);
    ::chmod(cache.directory().c_str(), 0777);
    _exit(refusal(KernelCache(), "mine").find("UNIEP_CACHE_DIR: others may write ") == 0 ? 0 : 7);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WEXITSTATUS(status) != 0) std::printf("a default folder: step %d\n", WEXITSTATUS(status));
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a default folder that others may write counts as absent");
  std::ifstream file(messages);
  std::string line, more;
  std::getline(file, line);
  expect(line.find("uniep: warning: others may write '" + home + "/uniep' (user ") == 0 &&
             line.find("mode 0777)") != std::string::npos && !std::getline(file, more),
         "and one line of the process says so");
}

// A write that ends half-way, as on a full disk: by a limit of file sizes, in a child.
void check_full_disk(const std::string& folder) {
  const KernelCache cache(folder);
  cache.store("kept", std::string(1000, 'k'));
  const pid_t child = fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{2000, 2000};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
    cache.store("large", std::string(5000, 'x'));
    cache.store("kept", std::string(5000, 'x'));
    cache.store("small", std::string(500, 's'));
    std::string found;
    _exit(!cache.load("large", found) && holds(cache, "kept", std::string(1000, 'k')) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a disk without room does no harm");
  expect(holds(cache, "small", std::string(500, 's')), "what still fits is stored");
  int left = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) left += entry.path().extension() == ".new";
  expect(left == 0, "nothing half-written is left");
}

// Several processes write and read the same key; nobody may ever see anything but a whole file.
void check_processes(const std::string& folder) {
  constexpr int kProcesses = 64;
  constexpr int kTurns = 60;
  for (int process = 0; process < kProcesses; ++process) {
    if (fork() != 0) continue;
    const KernelCache cache(folder);
    int wrong = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      cache.store("shared", std::string(20000, static_cast<char>('a' + (process + turn) % 26)));
      std::string found;
      if (!cache.load("shared", found) || found.size() != 20000 ||
          found.find_first_not_of(found[0]) != std::string::npos) {
        ++wrong;
      }
    }
    _exit(wrong == 0 ? 0 : 1);
  }
  bool good = true;
  for (int process = 0; process < kProcesses; ++process) {
    int status = 0;
    wait(&status);
    good = good && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  expect(good, "64 processes that make and share a folder see whole files");
  int64_t files = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) files += entry.is_regular_file() ? 1 : 0;
  expect(files == 1, "and leave one file");
}

// So do threads, which compile at once.
void check_threads(const std::string& folder) {
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&, thread] {
        const KernelCache cache(folder);
        for (int turn = 0; turn < 100; ++turn) {
          cache.store("threads", std::string(20000, static_cast<char>('a' + (thread + turn) % 26)));
          std::string found;
          const bool whole = cache.load("threads", found) && found.size() == 20000 &&
                             found.find_first_not_of(found[0]) == std::string::npos;
          wrong += whole ? 0 : 1;
        }
      });
    }
  }
  expect(wrong == 0, "8 threads that write one key see whole files");
}

void check_log() {
  const std::string log =
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
      "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
      "ptxas info    : Function properties for kernel\n"
      "    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 1 barriers\n";
  const ResourceUse use = parse_resource_use(log, "kernel");
  expect(use.registers == 168 && use.stack_bytes == 16 && use.spill_bytes == 56,
         "registers, stack and spills are read");
  expect(use.advisories.size() == 1, "advisories are read");
}

}  // namespace

int main() {
  const std::string folder = fs::temp_directory_path() / ("uniep_cache_test_" + std::to_string(getpid()));
  check_files(folder);
  fs::remove_all(folder);
  check_stale_files(folder);
  fs::remove_all(folder);
  check_trust(folder);
  fs::remove_all(folder);
  check_default_folder(folder);
  fs::remove_all(folder);
  check_full_disk(folder);
  fs::remove_all(folder);
  check_processes(folder);
  fs::remove_all(folder);
  check_threads(folder);
  fs::remove_all(folder);
  check_log();
  try {
    const KernelRequest one{"s", "f", {"A=1"}};
    const KernelRequest two{"s", "f", {"A=2"}};
    expect(cache_key(one) != cache_key(two) && cache_key(one) == cache_key(one), "the key changes with the options");
    bool told = false;
    try {
      compile_kernel({"engine/cuda/device/kernels/prob_sum.cu", "f", {"uniep=1 2"}});
    } catch (const uniep::Error& error) {
      told = std::string(error.what()).find("prob_sum.cu uniep=1 2") != std::string::npos &&
             std::string(error.what()).find("sm_90a") != std::string::npos;
    }
    expect(told, "a compile error names the kernel and its options");
  } catch (const uniep::Error& error) {
    std::printf("skip the key and compile errors: %s\n", error.what());
  }
  std::printf("kernel cache: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
