#pragma once

#include <elf.h>

#include <cstring>
#include <string>

#include "uniep/error.h"

namespace uniep::cuda::test {

// The instructions of a cubin's kernels, with their names: what a change of comments or lines leaves alone.
inline std::string machine_code(const std::string& cubin) {
  const auto part = [&](uint64_t offset, uint64_t bytes) {
    if (offset > cubin.size() || bytes > cubin.size() - offset) throw Error(Status::kInternal, "a cubin is cut short");
    return cubin.data() + offset;
  };
  Elf64_Ehdr header;
  std::memcpy(&header, part(0, sizeof(header)), sizeof(header));
  const auto section = [&](int index) {
    Elf64_Shdr found;
    std::memcpy(&found, part(header.e_shoff + static_cast<uint64_t>(index) * sizeof(found), sizeof(found)),
                sizeof(found));
    return found;
  };
  const Elf64_Shdr names = section(header.e_shstrndx);
  std::string code;
  for (int i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr found = section(i);
    const std::string name = part(names.sh_offset + found.sh_name, 1);
    if (name.starts_with(".text.")) code += name + std::string(part(found.sh_offset, found.sh_size), found.sh_size);
  }
  if (code.empty()) throw Error(Status::kInternal, "a cubin has no machine code");
  return code;
}

}  // namespace uniep::cuda::test
