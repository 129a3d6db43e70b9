#!/bin/bash
# Every GPU test once, in about eight minutes on one Hopper GPU, twelve on two, once their kernels are compiled (on 16 cores
# that takes some minutes more): a line a test with its result and seconds, and it goes on after a failure. Exit status 1
# where one failed. What takes longer: bench/several_gpus.sh.
# On two GPUs the tests that one is enough for run first, some on each; then those that need both.
# Usage: bench/check_gpus.sh BUILD [FOLDER [NAME...]]
#   BUILD   holds uniep, libuniep.so and tests (or the programs themselves, all in one folder)
#   FOLDER  takes a log a test; default: a new one in /tmp
#   NAME    of the tests that are wanted; default: all that so many GPUs can run
# Python's tests run where python3 has torch, Megatron's where it has megatron-core.
set -uo pipefail
build=$(realpath "$1")
folder=${2:-$(mktemp -d)}
shift $(($# < 2 ? $# : 2))
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/built.sh
. "$here/built.sh"
[ "$gpus" -gt 2 ] && gpus=2
devices=$(seq -s, 0 $((gpus - 1)))
export UNIEP_TEST_KERNELS=${UNIEP_TEST_KERNELS:-$here/../tests/cuda} UNIEP_TIMEOUT_S=${UNIEP_TIMEOUT_S:-8}
mkdir -p "$folder"
rm -f "$folder/failed"
wanted=("$@")

# Of the checks below, so that a name that is wrong is no success.
for name in "${wanted[@]}"; do
  grep -qE "check $name [0-9]" "$0" || { echo "NAME: $name; there is no such test" >&2; exit 2; }
done

is_wanted() { [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]; }

# check NAME SECONDS COMMAND...
check() {
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  is_wanted "$name" || return 0
  timeout "$limit" "$@" >"$folder/$name.log" 2>&1 || status=$?
  case $status in
    0) printf 'ok      %4d s  %-22s %s\n' $((SECONDS - begin)) "$name" "$(tail -n 1 "$folder/$name.log" | cut -c1-160)" ;;
    77) printf 'skipped %4d s  %s\n' $((SECONDS - begin)) "$name" ;;
    *)
      touch "$folder/failed"
      printf 'FAIL    %4d s  %s (status %d)\n%s\n%s\n' $((SECONDS - begin)) "$name" "$status" \
        "$(grep -E '^FAIL|Error|error:' "$folder/$name.log" | head -n 6 | cut -c1-300)" \
        "$(tail -n 3 "$folder/$name.log" | cut -c1-300)"
      ;;
  esac
}

layers=(--direction both --cases 24 --first 3000 --devices "$gpus" --launch random)
processes=()
[ "$gpus" -gt 1 ] && processes=(--processes)

# What one GPU is enough for, in two halves of about the same time.
kernels_and_memory() {
  check ptx 60 "$(program ptx)"
  check gemm 120 "$(program gemm)"
  check place_failure 60 "$(program place_failure)"
  check addresses 180 "$(program backward)" --only addresses
  check memory 180 "$(program backward)" --only memory
  check call_timer 90 "$(program call_timer)"
  check routing_maps 90 "$(program graph)" --only f
}
whole_layers() {
  if is_wanted activations; then
    "$(program layer)" --only activations --cases 8 --compile "$(nproc)" >"$folder/compile_activations.log" 2>&1
  fi
  check activations 150 "$(program layer)" --only activations --cases 8
  check verifier 240 "$(program verifier)"
  check verifier_fault 240 "$(program verifier_fault)"
}

# Beside the tests that need few kernels.
if is_wanted backward; then "$(program backward)" --compile "$(nproc)" >"$folder/compile_backward.log" 2>&1 & fi
if is_wanted layer; then "$(program layer)" "${layers[@]}" --compile "$(nproc)" >"$folder/compile_layer.log" 2>&1 & fi
if [ "$gpus" -gt 1 ]; then
  CUDA_VISIBLE_DEVICES=${visible_gpus[0]} kernels_and_memory &
  CUDA_VISIBLE_DEVICES=${visible_gpus[1]} whole_layers &
  wait
else
  kernels_and_memory
  wait
  whole_layers
fi
check lend 150 "$(program lend)"
check comm 120 "$(program comm)"
check place 120 "$(program place)"
check litmus 120 "$(program litmus)"
check mutant 150 "$(program mutant)" --devices "$gpus" --seconds 4 \
  --only flag-epoch,reduce-wait,stored-wait,one-lane-waits,stage-full
disturbed=(--direction both --only random --cases 12 --devices "$gpus" --disturb 1)
if is_wanted disturbed; then "$(program layer)" "${disturbed[@]}" --compile "$(nproc)" >"$folder/compile_disturbed.log" 2>&1; fi
check disturbed 150 "$(program layer)" "${disturbed[@]}"
check exchange 120 "$(program exchange)"
check backward 240 "$(program backward)" "${processes[@]}"
check layer 150 "$(program layer)" "${layers[@]}"
check graph 150 "$(program graph)" "${processes[@]}"
check input 60 "$(program input)" "${processes[@]}"
check model 90 "$(program model)" --models qwen3-30b --tokens 2048 --devices "$gpus"
check abort 150 "$(program abort)"
check coexistence 60 "$(program coexistence)"
check groups 120 "$(program groups)"
if [ "$gpus" -gt 1 ]; then check failure 240 "$(program failure)"; fi
# What it finds stays out of the other tests' cache, which is its kernels' too. One direction, since it compiles by itself.
check tune 150 env UNIEP_CACHE_DIR="$folder/tuned" "$build/uniep" tune --engine cuda --ranks "$gpus" --devices "$devices" \
  --shape 2048,768,32,8 --tokens 4096 --direction forward --candidates 3 --budget 10
if python3 -c 'import torch' 2>/dev/null; then
  library=$build/libuniep.so
  export PYTHONPATH="$here/../python:${PYTHONPATH:-}" UNIEP_LIBRARY=$library PYTHONDONTWRITEBYTECODE=1
  check python 300 torchrun --nproc-per-node "$gpus" "$here/../python/tests/gpu_checks.py"
  if python3 -c 'import megatron.core' 2>/dev/null; then
    check megatron 300 torchrun --nproc-per-node "$gpus" "$here/../python/tests/gpu_megatron.py" --layers 2 --steps 10 --repeat 5
  fi
fi
echo "logs in $folder"
[ ! -e "$folder/failed" ]
