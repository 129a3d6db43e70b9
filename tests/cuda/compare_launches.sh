#!/bin/bash
# The same bytes of y and z, and of the gradients, from ranks in one process and from a process a GPU: started by uniep itself, and each on its
# own in torchrun's environment. Then what is said when a rank fails.
# Usage: tests/cuda/compare_launches.sh UNIEP [RANKS]; needs that many Hopper GPUs.
set -euo pipefail
uniep=$1
ranks=${2:-$(nvidia-smi --list-gpus | wc -l)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

traced_ranks() {
  grep -o '"rank [0-9]*"' "$1" | sort -u
}

compare() {
  local layer=(run --engine cuda --ranks "$ranks" "$@")
  timeout 300 "$uniep" "${layer[@]}" --out "$folder/threads" --trace "$folder/threads.trace" >/dev/null
  timeout 300 "$uniep" "${layer[@]}" --launch processes --check --out "$folder/processes" --trace "$folder/trace" \
    --json "$folder/json" --repeat 5
  cmp "$folder/threads" "$folder/processes"
  timeout 60 "$uniep" trace "$folder/trace" --svg "$folder/svg" >/dev/null
  diff <(traced_ranks "$folder/threads.trace") <(traced_ranks "$folder/trace")
  echo "equal, median $(tr -d ' \n' <"$folder/json" | grep -o '"median":[0-9.]*' | head -1 | cut -d: -f2) ms: $*"
}

tokens=
for ((rank = 0; rank < ranks; ++rank)); do tokens+=${tokens:+,}$((rank % 3 == 1 ? 0 : 300 + 77 * rank)); done
compare --tokens 512 --experts $((4 * ranks))
compare --tokens "$tokens" --experts $((16 * ranks)) --topk 6 --routing zipf:0.8 --seed 5
compare --tokens "$tokens" --experts $((4 * ranks)) --routing one --schedule fusion=none
compare --tokens 700 --hidden 1024 --intermediate 512 --experts $((8 * ranks)) --topk 8 --shuffle 3 \
  --schedule comm.where=sms,combine.transport=staged,queue=static
compare --tokens 4096 --hidden 2048 --intermediate 1024 --experts $((8 * ranks)) --topk 8 --capacity 131072

# Backward, each way that weight gradients leave.
backward=(--backward --schedule-backward "fusion=pairs,dispatch.transport=pull")
for wgrad in bf16 fp32 main_grad; do
  compare --tokens "$tokens" --experts $((4 * ranks)) --seed 9 --wgrad "$wgrad" "${backward[@]}"
done
compare --tokens 4096 --hidden 2048 --intermediate 1024 --experts $((8 * ranks)) --topk 8 --capacity 131072 \
  --schedule save.xg=redispatch "${backward[@]}"
compare --tokens "$tokens" --experts $((4 * ranks)) --routing one --backward --schedule fusion=none,dispatch.transport=pull

# The names of all that `uniep bench` measures, which both launches print.
measured() {
  timeout 300 "$uniep" bench --ranks "$ranks" --tokens 300 --shape 512,256,$((8 * ranks)),4 --repeat 3 --json - "$@" |
    grep -o '"name": "[^"]*"\|"[^"]*": GB/s[^"]*"\|"[a-z_]*":'
}
devices=$(seq -s, 0 $((ranks - 1)))
for op in layer backward step dispatch combine; do
  more=()
  case $op in backward | step) more=(--schedule-backward "fusion=pairs,dispatch.transport=pull") ;; esac
  diff <(measured --op "$op" --devices "$devices" "${more[@]}") <(measured --op "$op" --launch processes "${more[@]}")
done
diff <(measured --op layer --devices "$devices" --warm-up 0.2) <(measured --op layer --launch processes --warm-up 0.2)
echo "uniep bench prints the same results with a process a GPU"

layer=(run --engine cuda --tokens 512 --experts $((4 * ranks)) --launch processes)
port=$((20000 + $$ % 10000))
for ((rank = 0; rank < ranks; ++rank)); do
  RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 300 "$uniep" \
    "${layer[@]}" --out "$folder/torchrun" >"$folder/rank$rank" &
  started[rank]=$!
done
for process in "${started[@]}"; do wait "$process"; done
timeout 300 "$uniep" run --engine cuda --ranks "$ranks" --tokens 512 --experts $((4 * ranks)) \
  --out "$folder/threads" >/dev/null
cmp "$folder/threads" "$folder/torchrun"
grep -q checksum "$folder/rank0"
for ((rank = 1; rank < ranks; ++rank)); do [ ! -s "$folder/rank$rank" ]; done
echo "equal in torchrun's environment; only rank 0 prints"

# fails STATUS TEXT COMMAND...: with that status and one line that holds the text.
fails() {
  local expected=$1 text=$2 status=0
  shift 2
  timeout 120 "$@" 2>"$folder/errors" || status=$?
  if [ "$status" != "$expected" ] || [ "$(wc -l <"$folder/errors")" != 1 ] || ! grep -q -e "$text" "$folder/errors"; then
    echo "status $status instead of $expected with '$text': $*" >&2
    cat "$folder/errors" >&2
    exit 1
  fi
}
fails 2 'LOCAL_RANK: [0-9]*; there are 1 GPUs' env CUDA_VISIBLE_DEVICES=0 "$uniep" "${layer[@]}" --ranks "$ranks"
fails 1 'rank 0: --out: ' "$uniep" "${layer[@]}" --ranks "$ranks" --out /no-such-folder/file
fails 2 'dispatch.transport: push' "$uniep" "${layer[@]}" --ranks "$ranks" --schedule dispatch.transport=push
echo "a failure ends all ranks, and is one line"
