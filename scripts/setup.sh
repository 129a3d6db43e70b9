#!/usr/bin/env bash
# Installs what building and testing needs from Debian's packages, and nothing when all is there.
set -euo pipefail

packages=(
  g++ cmake ninja-build make git                # build
  nlohmann-json3-dev libcli11-dev libfmt-dev    # JSON, command line, formatting
  libgtest-dev                                  # tests
  libbenchmark-dev libopenblas-dev              # the CPU GEMM's benchmark and its yardstick
  clang clang-format lld                        # format, fuzzing, sanitizers
  libclang-rt-14-dev                            # libFuzzer's and the sanitizers' run time for clang 14
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "installing: ${missing[*]}"
run() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
run apt-get update -qq
DEBIAN_FRONTEND=noninteractive run apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
