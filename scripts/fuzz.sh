#!/usr/bin/env bash
# Runs every fuzz target from its seed corpus, for some seconds each, under AddressSanitizer and UBSan; any finding fails.
#   scripts/fuzz.sh [SECONDS_PER_TARGET=10 [BUILD_DIR]]
#   scripts/fuzz.sh --build                               builds them, and runs none
# Findings and new inputs stay in the build folder: fuzz_TARGET FILE runs a finding again, and later runs go on from
# the inputs.
set -euo pipefail
cd "$(dirname "$0")/.."

build_only=0
if [ "${1:-}" = --build ]; then
  build_only=1
  shift
fi
seconds=${1:-10}
build=${2:-build/fuzz}
targets=(calibration machine npy safetensors schedule trace tuned tuner)
case $seconds in
  '' | *[!0-9]* | 0*) echo "usage: scripts/fuzz.sh [SECONDS_PER_TARGET [BUILD_DIR]], not '$seconds' seconds" >&2; exit 2 ;;
esac

cmake -G Ninja -S . -B "$build" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
  -DUNIEP_SANITIZE=fuzzer-no-link,address,undefined -DUNIEP_BUILD_FUZZERS=ON \
  -DUNIEP_BUILD_TESTS=OFF -DUNIEP_BUILD_CLI=OFF -DUNIEP_BUILD_BENCH=OFF -DUNIEP_CUDA_INCLUDE:PATH=OFF >/dev/null
cmake --build "$build" -j "$(nproc)" --target "${targets[@]/#/fuzz_}"
[ "$build_only" = 0 ] || exit 0

# Memory limits are part of the test: a small file must not make a reader ask for much.
fuzz() {
  local target=$1 log=$2/fuzz/$1.log
  mkdir -p "$2/fuzz/$1"
  if "$2/tests/fuzz/fuzz_$1" -max_total_time="$3" -max_len=8192 -timeout=20 -rss_limit_mb=1024 -malloc_limit_mb=64 \
    -print_final_stats=1 -artifact_prefix="$2/fuzz/$1-" "$2/fuzz/$1" "tests/fuzz/corpus/$1" >"$log" 2>&1; then
    echo "fuzz_$target: clean, $(grep -o 'number_of_executed_units: .*' "$log"), $(grep -o 'cov: [0-9]*' "$log" | tail -1)"
  else
    tail -n 60 "$log"
    echo "fuzz_$target: a finding, see $log" >&2
    return 1
  fi
}
export -f fuzz
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c "fuzz {} '$build' '$seconds'"
