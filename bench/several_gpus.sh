#!/bin/bash
# What is to be seen on a machine with several Hopper GPUs, all of them: the tests that need several (symmetric memory
# between processes and in one, exchanges, layers, in one process and a process a GPU, whole models, all-reduces beside
# them, two groups on the same GPUs, ranks that are killed, stopped or fail), then dispatch and combine by SMs and beside
# NCCL's, layers with given and new placement and with uneven routing, in one process and with a process a GPU, the
# grouped GEMMs beside torch's (at the power limit, and from idle), and whole layers beside serialized ones, forward,
# backward and both (both ways, too).
# Usage: bench/several_gpus.sh BUILD [FOLDER]   (BUILD holds uniep and tests; FOLDER takes the JSON files)
# Needs python3 with torch, and NCCL where the dynamic linker or torch finds it.
set -euo pipefail
build=$1
folder=${2:-.}
uniep=$build/uniep
tests=$build/tests/cuda
gpus=$(nvidia-smi --list-gpus | wc -l)
devices=$(seq -s, 0 $((gpus - 1)))
here=$(cd "$(dirname "$0")" && pwd)
export UNIEP_TEST_KERNELS=${UNIEP_TEST_KERNELS:-$here/../tests/cuda}
if [ -z "${UNIEP_LIBNCCL:-}" ]; then
  torchs=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' || true)
  [ -e "$torchs" ] && export UNIEP_LIBNCCL=$torchs
fi
timeout 300 "$build/tests/cli_bench_test"
timeout 120 "$tests/uniep_gpu_comm_tests" --ranks "$gpus" --processes
timeout 120 "$tests/uniep_gpu_comm_tests" --ranks "$gpus"
timeout 300 "$tests/uniep_gpu_exchange_tests"
timeout 120 "$tests/uniep_gpu_coexistence_tests"
timeout 300 "$tests/uniep_gpu_place_tests"
timeout 120 "$tests/uniep_gpu_place_failure_tests"
timeout 480 "$tests/uniep_gpu_groups_tests"
timeout 600 "$tests/uniep_gpu_failure_tests"
timeout 600 "$tests/uniep_gpu_graph_tests" --processes
timeout 600 "$tests/uniep_gpu_backward_tests" --compile "$(nproc)"
timeout 1200 "$tests/uniep_gpu_backward_tests" --processes
timeout 120 "$tests/uniep_gpu_input_tests" --processes
timeout 300 "$tests/uniep_gpu_layer_tests" --devices "$gpus"
layers=(--cases 120 --first 30000 --any-kernel --launch random --devices "$gpus")
timeout 900 "$tests/uniep_gpu_layer_tests" "${layers[@]}" --compile "$(nproc)"
timeout 300 "$tests/uniep_gpu_layer_tests" "${layers[@]}"
timeout 300 "$tests/uniep_gpu_model_tests" --devices "$gpus"
timeout 300 "$tests/uniep_gpu_model_tests" --devices "$gpus" --models qwen3-30b --tokens 32768
timeout 300 "$tests/uniep_gpu_model_tests" --devices "$gpus" --models qwen3-30b --tokens 1024 --repeat 1000 --schedules \
  'fusion=layer;fusion=pairs;fusion=none;dispatch.transport=push;comm.where=sms,combine.transport=staged'
"$here/../tests/cuda/compare_launches.sh" "$uniep" "$gpus"

exchange() {
  local name=$1
  shift
  echo "== $name"
  timeout 120 "$uniep" bench --ranks "$gpus" --devices "$devices" --tokens 4096 --hidden 7168 --experts 256 --topk 8 \
    "$@" --json "$folder/$name.json"
}
exchange dispatch --op dispatch
exchange combine_groups --op combine --combine-groups "$gpus"
exchange combine_flat --op combine
timeout 300 python3 "$here/compare_exchange.py" "$uniep" --json "$folder/compare_exchange.json"

layer() {
  local name=$1
  shift
  echo "== $name"
  timeout 120 "$uniep" bench --op layer --ranks "$gpus" --devices "$devices" --tokens 8192 "$@" --json "$folder/$name.json"
}
for shape in dsv3 qwen3-235b qwen3-30b mixtral; do layer "layer_$shape" --shape "$shape"; done
for shape in dsv3 qwen3-235b; do layer "layer_zipf_$shape" --shape "$shape" --routing zipf:1; done
timeout 1800 python3 "$here/launch_modes.py" "$uniep" --devices "$devices" --json "$folder/launch_modes.json"
timeout 900 python3 "$here/compare.py" "$uniep" --repeat 40 --rounds 2 --json "$folder/compare.json"
timeout 900 python3 "$here/compare.py" "$uniep" --repeat 40 --rounds 2 --warm-up 0 --json "$folder/compare_from_idle.json"
timeout 420 python3 "$here/compare_layers.py" "$uniep" --repeat 20 --json "$folder/compare_layers.json"
timeout 420 python3 "$here/compare_layers.py" "$uniep" --repeat 12 --warm-up 0 --json "$folder/compare_layers_after_pauses.json"
for op in backward step; do
  for shape in dsv3 qwen3-235b qwen3-30b mixtral; do
    timeout 180 "$uniep" bench --op "$op" --ranks "$gpus" --devices "$devices" --tokens 8192 --warm-up 0.3 --shape "$shape" \
      --json "$folder/${op}_$shape.json"
  done
  timeout 600 python3 "$here/compare_layers.py" "$uniep" --op "$op" --repeat 15 --json "$folder/compare_layers_$op.json"
  timeout 600 python3 "$here/compare_layers.py" "$uniep" --op "$op" --repeat 12 --warm-up 0 \
    --json "$folder/compare_layers_${op}_after_pauses.json"
done
for more in "--wgrad accumulate" "--schedule save.xg=redispatch" "--launch processes"; do
  # shellcheck disable=SC2086
  timeout 180 "$uniep" bench --op backward --ranks "$gpus" --devices "$devices" --tokens 8192 --warm-up 0.3 --shape dsv3 \
    --only layer $more
done
