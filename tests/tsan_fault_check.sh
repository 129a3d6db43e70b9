#!/usr/bin/env bash
# Shows that ThreadSanitizer sees a missing wait in the CPU engine: with each of these faults planted, its test must end
# with a report of a data race. Usage: tests/tsan_fault_check.sh ENGINE_TESTS, the program of a build with
# UNIEP_SANITIZE=thread.
set -euo pipefail

engine_tests=${1:?usage: tests/tsan_fault_check.sh ENGINE_TESTS}
race_status=66
export TSAN_OPTIONS=exitcode=$race_status:halt_on_error=1 UNIEP_INSTRUCTION_SET=portable

for fault in MissingWait SwappedThreshold StaleEpoch EarlyFlag; do
  status=0
  output=$("$engine_tests" --gtest_filter="Planted/FaultTest.IsCaughtEveryTime/$fault" 2>&1) || status=$?
  if [ "$status" -ne "$race_status" ] || ! grep -q 'WARNING: ThreadSanitizer: data race' <<<"$output"; then
    printf '%s\n' "$output"
    echo "$fault: exit status $status and no data race reported; expected ThreadSanitizer's report and $race_status" >&2
    exit 1
  fi
  echo "$fault: reported, $(grep -m1 -o 'SUMMARY: ThreadSanitizer: .*' <<<"$output" | sed "s|$PWD/||")"
done
