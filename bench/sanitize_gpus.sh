#!/bin/bash
# compute-sanitizer over the GPU tests that are small enough for it, in about three minutes once kernels are compiled.
# Usage: bench/sanitize_gpus.sh BUILD [FOLDER [SECONDS]]
#   BUILD    holds tests (or the programs themselves, all in one folder)
#   FOLDER   takes a log a run; default: a new one in /tmp
#   SECONDS  of one run at most (default 150); one that is cut says so
# Prints a line a run: what it ended with, the tool's last word, and the test's. On two GPUs memcheck has the first one
# and racecheck the second, side by side; then memcheck sees a layer over both. Exit status 1 where memcheck found
# something or a test failed. What racecheck and synccheck report that is none: docs/testing.md.
set -uo pipefail
build=$(realpath "$1")
folder=${2:-$(mktemp -d)}
seconds=${3:-150}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/built.sh
. "$here/built.sh"
export UNIEP_TEST_KERNELS=${UNIEP_TEST_KERNELS:-$here/../tests/cuda} UNIEP_TIMEOUT_S=${UNIEP_TIMEOUT_S:-120}
mkdir -p "$folder"
rm -f "$folder/failed"

# sanitize TOOL NAME COMMAND...
sanitize() {
  local tool=$1 name=$2 begin=$SECONDS status=0
  shift 2
  local log=$folder/$tool.$name.log
  timeout "$seconds" compute-sanitizer --tool "$tool" --target-processes all "$@" >"$log" 2>&1 || status=$?
  printf '%-10s %-12s %4d s  status %d  %s | %s\n' "$tool" "$name" $((SECONDS - begin)) "$status" \
    "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1)" "$(grep -vE '^=====' "$log" | tail -n 1 | cut -c1-100)"
  local bad=0
  grep -q '^FAIL' "$log" && bad=1
  case $status in
    124) # cut: what was found until then counts
      echo "           $name was cut after $seconds s: no verdict on the rest"
      [ "$tool" = memcheck ] && grep -qE '^========= (Invalid|Program hit)' "$log" && bad=1
      ;;
    0) [ "$tool" = memcheck ] && ! grep -q 'ERROR SUMMARY: 0 errors' "$log" && bad=1 ;;
    *) bad=1 ;;
  esac
  [ "$bad" -eq 0 ] || touch "$folder/failed"
}

accesses() {
  sanitize memcheck gemm "$(program gemm)" --tiny
  sanitize memcheck place "$(program place_failure)" --rounds 1
  sanitize memcheck layer "$(program layer)" --direction both --cases 3
  sanitize memcheck call_timer "$(program call_timer)" --events
  sanitize memcheck lend "$(program lend)" --bytes --calls 2
  sanitize memcheck graphs "$(program graph)" --only a,b,c,d,g --replays 20
  sanitize memcheck activations "$(program layer)" --only activations --cases 2
}
races() {
  sanitize racecheck gemm "$(program gemm)" --tiny
  sanitize racecheck call_timer "$(program call_timer)" --events
  sanitize racecheck layer "$(program layer)" --direction both --cases 1
}

if [ "$gpus" -gt 1 ]; then
  CUDA_VISIBLE_DEVICES=${visible_gpus[0]} accesses &
  CUDA_VISIBLE_DEVICES=${visible_gpus[1]} races &
  wait
  sanitize memcheck two_gpus "$(program layer)" --direction both --cases 4 --devices 2
else
  accesses
  races
fi
sanitize synccheck layer "$(program layer)" --direction forward --cases 1
echo "logs in $folder"
[ ! -e "$folder/failed" ]
