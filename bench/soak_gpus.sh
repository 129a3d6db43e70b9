#!/bin/bash
# Random layers, with delays in their kernels and on a GPU that another process has, too, ranks that fail and recover,
# Groups beside each other and calls beside copies, forward and backward, round after round, each with other seeds:
# nothing may be lost, hang or differ, and after each round the GPUs' memory must be as free as before the first. A run
# goes on where the last one ended, so that it can be made in parts of any length.
# Usage: bench/soak_gpus.sh BUILD FOLDER [SECONDS [ROUND]]
#   BUILD    holds uniep and tests (or the programs themselves, all in one folder)
#   FOLDER   takes rounds.tsv, a line a step that has ended (round, step, seconds, result, its last line), and the logs
#            of steps that failed
#   SECONDS  in which the rounds are to end (default 600): none begins that would take longer than the last one left. The
#            first one runs in any case
#   ROUND    the first one's number, from which its seeds come (default: behind the last one in FOLDER)
# Prints a line a round and what all runs so far come to. Exit status 1 where a step of any run failed, 77 without a GPU.
set -uo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
build=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
seconds=${3:-600}
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/built.sh
. "$here/built.sh"
if [ "$gpus" -eq 0 ]; then
  echo "skipped: no GPU"
  exit 77
fi
[ "$gpus" -gt 2 ] && gpus=2
export UNIEP_TEST_KERNELS=${UNIEP_TEST_KERNELS:-$here/../tests/cuda} UNIEP_TIMEOUT_S=${UNIEP_TIMEOUT_S:-30}
table=$folder/rounds.tsv
touch "$table"

# By the driver itself: nvidia-smi says 0 in some containers.
used() {
  python3 - "$gpus" <<'END'
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status: sys.exit(f"{name}: status {status}")
call("cuInit", 0)
for gpu in range(int(sys.argv[1])):
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
    call("cuCtxSetCurrent", context)
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    print((total.value - free.value) >> 20, end=" ")
END
}

# step NAME SECONDS COMMAND...: of the round
step() {
  local name=$1 limit=$2 begin=$SECONDS status=0 result=ok log=$folder/$round.$1.log
  shift 2
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 || status=$?
  case $status in
    0) ;;
    77) result=skipped ;;
    *) result="FAIL $status" ;;
  esac
  printf '%d\t%s\t%d\t%s\t%s\n' "$round" "$name" $((SECONDS - begin)) "$result" "$(tail -n 1 "$log" | cut -c1-120)" >>"$table"
  if [[ $result != FAIL* ]]; then rm -f "$log"; fi
}

# The other process multiplies, and has the first GPU in turn with the command, as the driver slices time.
# shellcheck disable=SC2016
shared_gpu='CUDA_VISIBLE_DEVICES=$0 "$1" bench --op gemm --engine cuda --ranks 1 --devices 0 \
    --shape 2048,768,16,4 --tokens 4096 --warm-up 600 >"$2" 2>&1 &
  other=$!
  sleep 2
  status=0
  "${@:3}" || status=$?
  kill "$other" 2>/dev/null || { echo "the other process had ended: $(tail -n 1 "$2")"; status=1; }
  for ((left = 200; left > 0; --left)); do kill -0 "$other" 2>/dev/null && sleep 0.1 || break; done
  if [ "$left" -eq 0 ]; then
    for thread in "/proc/$other/task"/*; do  # a signal waits while a thread is in a system call that does not end
      echo "$(cat "$thread/comm"): $(grep -E "^(State|SigPnd|ShdPnd)" "$thread/status" | tr "\n\t" "; ") system call" \
        "$(cat "$thread/syscall"); $(cat "$thread/wchan"); $(head -n 8 "$thread/stack" | tr "\n" " ")"
    done
    echo "the other process does not end"
    kill -9 "$other"
    status=1
  fi
  wait
  exit $status'
# 64 MiB are the driver's own ups and downs.
# shellcheck disable=SC2016
same_memory='echo "MiB in use, at first: $1, now: $2"
  first=($1) now=($2)
  [ ${#first[@]} -gt 0 ] && [ ${#now[@]} -eq ${#first[@]} ] && [ "${first[0]}" -gt 0 ] || exit 1
  for gpu in "${!first[@]}"; do [ $((now[gpu] - first[gpu])) -le 64 ] || exit 1; done'
before=$(used)
round=$(cut -f1 "$table" | sort -n | tail -n 1)
round=${4:-$((${round:-0} + 1))}
while :; do
  begin=$SECONDS
  layers=(--direction both --only random --cases 12 --first $((100000 + 12 * round)) --devices "$gpus")
  # Kernels first, so that a limit is one of the calls alone; most of a later round's are there by then.
  "$(program layer)" "${layers[@]}" --launch random --compile "$(nproc)" >"$folder/compile.log" 2>&1
  "$(program layer)" "${layers[@]}" --disturb "$round" --compile "$(nproc)" >>"$folder/compile.log" 2>&1
  step layers 180 "$(program layer)" "${layers[@]}" --launch random
  step shared_gpu 180 bash -c "$shared_gpu" "${visible_gpus[0]}" "$(built uniep)" "$folder/other.log" \
    "$(program layer)" "${layers[@]}" --launch random
  step delayed_layers 180 "$(program layer)" "${layers[@]}" --disturb "$round"
  step failures 180 "$(program failure)" --moments 12 --seed "$round"
  step aborts 150 "$(program abort)"
  step groups 180 "$(program groups)" --rounds 10
  step traffic 120 "$(program backward)" --only silent,traffic --calls 200
  step memory 30 bash -c "$same_memory" _ "$before" "$(used)"
  awk -F'\t' -v round="$round" '$1 == round { n++; s += $3; if ($4 ~ /^FAIL/) { f++; names = names " " $2 } }
    END { printf "round %d: %d steps, %d failed%s, %d s\n", round, n, f, names, s }' "$table"
  round=$((round + 1))
  [ $((2 * SECONDS - begin)) -lt "$seconds" ] || break
done
awk -F'\t' '{ n++; s += $3; rounds[$1] = 1; if ($4 ~ /^FAIL/) f++; if ($4 == "skipped") k++
    if (match($5, /[0-9]+ passed/)) p += substr($5, RSTART, RLENGTH - 7) }
  END { for (r in rounds) all++; printf "%d rounds, %d steps: %d failed, %d skipped; %d checks passed; %d s\n", all, n, f, k, p, s
        exit f > 0 }' "$table"
