#include <exception>
#include <filesystem>
#include <utility>

#include "fuzz_target.h"
#include "io/file.h"

// Stands in for libFuzzer in ordinary builds: runs the target once on each file of a folder.
int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER, not %d arguments\n", argv[0], argc - 1);
    return 2;
  }
  try {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      std::printf("%s\n", entry.path().filename().c_str());
      std::fflush(stdout);
      const std::vector<std::byte> bytes = uniep::io::read_file(entry.path());
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++files;
    }
    if (files > 0) return 0;
    std::fprintf(stderr, "no file in %s\n", argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
