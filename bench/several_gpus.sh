#!/bin/bash
# What is to be seen on a machine with several Hopper GPUs, all of them, in parts, most valuable first. Each part is a row
# of steps with a limit each; a step that has passed is not run again, so that a run that was cut goes on where it was.
# Usage: bench/several_gpus.sh BUILD FOLDER [PART...]
#   BUILD    holds uniep, libuniep.so and tests (or the programs themselves, all in one folder)
#   FOLDER   takes of each step a log, its JSON and, once it has passed, NAME.done
#   PART     default all, in this order:
#     pilot      whole models in Megatron-core with each MoE layer that is here; needs torch, megatron-core, numpy and pyyaml
#     bytes      tests that several GPUs can show something in, in one process and with a process a GPU
#     layers     whole layers beside torch's GEMMs, NCCL and, where it imports, DeepEP
#     exchange   dispatch and combine alone by SMs; the grouped GEMMs
#     model      placement, layers back to back, launch modes
#     search     default, auto and tune; a job that tunes itself; the machine's description
#     timelines  of forward and backward, for Perfetto and `uniep trace`
#     failures   faults planted into kernels, litmus tests, layers under delays, aborts, sanitizers and a soak, on two GPUs
# UNIEP_BENCH_SECONDS (default 0: no end): the run ends after so many seconds. A step that it cuts is left for the next run.
# UNIEP_BENCH_STEPS (default all): an extended regular expression; steps whose names do not match it are passed over.
# PILOT_LAYERS (8), PILOT_TURNS (4) and PILOT_STEPS (75): of the pilot's models.
# Prints a line a step. Exit status 1 where one failed, 3 where some are left to be run. python3 must have torch.
set -uo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,22s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
build=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
shift 2
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(pilot bytes layers exchange model search timelines failures)
for part in "${parts[@]}"; do
  case $part in
    pilot | bytes | layers | exchange | model | search | timelines | failures) ;;
    *)
      echo "PART: $part; legal are pilot, bytes, layers, exchange, model, search, timelines, failures" >&2
      exit 2
      ;;
  esac
done
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/built.sh
. "$here/built.sh"
uniep=$build/uniep
devices=$(seq -s, 0 $((gpus - 1)))
seconds=${UNIEP_BENCH_SECONDS:-0}
shapes=(dsv3 qwen3-235b qwen3-30b mixtral)
failed=0 left=0
export UNIEP_TEST_KERNELS=${UNIEP_TEST_KERNELS:-$here/../tests/cuda} UNIEP_LIBRARY=${UNIEP_LIBRARY:-$build/libuniep.so}
export PYTHONPATH=$here/../python:${PYTHONPATH:-} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  [ ! -e "$folder/$name.done" ] && [[ $name =~ ${UNIEP_BENCH_STEPS:-} ]] || return 0
  local rest=$limit
  if [ "$seconds" -gt 0 ] && [ $((begin + limit)) -gt "$seconds" ]; then rest=$((seconds - begin)); fi
  [ "$rest" -le 0 ] || timeout -k 10 "$rest" "$@" >"$folder/$name.log" 2>&1 || status=$?
  if [ "$rest" -le 0 ] || { [ "$rest" -lt "$limit" ] && { [ $status -eq 124 ] || [ $status -eq 137 ]; }; }; then
    printf 'left    %4d s  %s (up to %d s)\n' $((SECONDS - begin)) "$name" "$limit"
    left=1
  elif [ $status -eq 0 ]; then
    touch "$folder/$name.done"
    printf 'ok      %4d s  %s  %s\n' $((SECONDS - begin)) "$name" "$(tail -n 1 "$folder/$name.log" | cut -c1-140)"
  elif [ $status -eq 77 ]; then
    printf 'skipped %4d s  %s\n' $((SECONDS - begin)) "$name"
  else
    failed=1
    printf 'FAIL    %4d s  %s (status %d)\n%s\n' $((SECONDS - begin)) "$name" "$status" "$(tail -n 4 "$folder/$name.log" | cut -c1-300)"
  fi
}

bench() {
  local name=$1
  shift
  step "$name" 180 "$uniep" bench --ranks "$gpus" --devices "$devices" --json "$folder/$name.json" "$@"
}

beside_others() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" python3 "$here/compare_layers.py" "$uniep" --json "$folder/$name.json" "$@"
}

pilot() {
  local run=(torchrun --nproc-per-node "$gpus" -m uniep.pilot)
  local turns=(--turns "${PILOT_TURNS:-4}" --steps "${PILOT_STEPS:-75}" --warm 3)
  for model in qwen3-30b deepseek-v2-lite; do
    step "compile_$model" 300 "$uniep" compile --engine cuda --shape "$model" --ranks "$gpus" --tokens 4096 --wgrad accumulate \
      --op layer --out "${UNIEP_CACHE_DIR:-$HOME/.cache/uniep}"
    step "pilot_$model" 590 "${run[@]}" --model "$model" --layers "${PILOT_LAYERS:-8}" "${turns[@]}" --parts preflight,turns \
      --reserve-sms '' --out "$folder/pilot_$model"
  done
  step pilot_bits 300 env NCCL_ALGO=Ring "${run[@]}" --model qwen3-30b --layers 1 --turns 1 \
    --steps 4 --warm 2 --arms stock,uniep --parts deterministic,bits,kill --bit-layers 1 --bit-steps 4 --reserve-sms '' \
    --out "$folder/pilot_bits"
  if python3 -c 'import transformer_engine' 2>/dev/null; then
    step pilot_graphs 590 "${run[@]}" --model qwen3-30b --layers "${PILOT_LAYERS:-8}" "${turns[@]}" --parts turns --cuda-graphs \
      --reserve-sms '' --out "$folder/pilot_graphs"
  fi
  step pilot_curves 590 "${run[@]}" --model qwen3-30b --layers 2 --arms stock,uniep --parts curves --curve-steps 500 \
    --reserve-sms '' --out "$folder/pilot_curves"
}

bytes() {
  local drawn=(--direction both --cases 100 --first 30000 --any-kernel --launch random --devices "$gpus")
  step comm 120 "$(program comm)" --ranks "$gpus"
  step comm_processes 120 "$(program comm)" --ranks "$gpus" --processes
  step compile_layers 590 "$(program layer)" "${drawn[@]}" --compile "$(nproc)"
  step layers_drawn 590 "$(program layer)" "${drawn[@]}"
  step models 300 "$(program model)" --devices "$gpus"
  step models_long 300 "$(program model)" --devices "$gpus" --models qwen3-30b --tokens 32768
  step models_repeated 300 "$(program model)" --devices "$gpus" --models qwen3-30b --tokens 1024 --repeat 1000 --schedules \
    'fusion=layer;fusion=pairs;fusion=none;dispatch.transport=push;comm.where=sms,combine.transport=staged'
  step one_rank_or_all 300 "$uniep" train --engine cuda --ranks "$gpus" --devices "$devices" --experts $((4 * gpus)) --steps 40 \
    --hidden 256 --intermediate 128 --compare sequential
  step launches 590 "$here/../tests/cuda/compare_launches.sh" "$uniep" "$gpus"
  step cli_bench 300 "$(built tests/cli_bench_test)"
  step cli_run 300 "$(built tests/cli_run_test)"
  step compile_backward 590 "$(program backward)" --compile "$(nproc)"
  step backward 590 "$(program backward)" --processes
  step graph 590 "$(program graph)" --processes
  step exchange_tests 300 "$(program exchange)"
  step place 300 "$(program place)"
  step place_failure 120 "$(program place_failure)"
  step groups 480 "$(program groups)"
  step failure 590 "$(program failure)"
  step coexistence 120 "$(program coexistence)"
  step input 120 "$(program input)" --processes
  step call_timer 120 "$(program call_timer)"
  step python 300 torchrun --nproc-per-node "$gpus" "$here/../python/tests/gpu_checks.py"
}

layers() {
  for op in forward backward step; do
    beside_others "layers_$op" 590 --op "$op" --tokens 8192 --rounds 2
  done
  beside_others layers_processes 300 --op forward,backward --processes --shapes qwen3-235b,qwen3-30b --rounds 2
  for op in forward backward; do beside_others "layers_${op}_4096" 590 --op "$op" --tokens 4096 --rounds 2; done
  for shape in dsv3 qwen3-235b; do
    bench "zipf_$shape" --op layer --tokens 8192 --shape "$shape" --routing zipf:1
    bench "zipf_backward_$shape" --op backward --tokens 8192 --warm-up 0.3 --shape "$shape" --routing zipf:1
  done
  for op in forward backward step; do
    beside_others "layers_${op}_after_pauses" 590 --op "$op" --tokens 8192 --rounds 2 --warm-up 0
  done
  step ways 590 python3 "$here/backward_ways.py" "$uniep" --ranks "$gpus" --ways 'plain,+= main_grad,redispatch,recompute,later' \
    --rounds 2 --repeat 8 --json "$folder/ways.json"
}

exchange() {
  local sizes=(--tokens 4096 --hidden 7168 --experts 256 --topk 8)
  step exchange_beside_others 300 python3 "$here/compare_exchange.py" "$uniep" --json "$folder/exchange_beside_others.json"
  bench dispatch --op dispatch "${sizes[@]}"
  bench combine_flat --op combine "${sizes[@]}"
  bench combine_groups --op combine "${sizes[@]}" --combine-groups "$gpus"
  step gemms 590 python3 "$here/compare.py" "$uniep" --repeat 40 --rounds 1 --json "$folder/gemms.json"
  step gemms_from_idle 590 python3 "$here/compare.py" "$uniep" --repeat 40 --rounds 1 --warm-up 0 \
    --json "$folder/gemms_from_idle.json"
}

model() {
  step launch_modes 590 python3 "$here/launch_modes.py" "$uniep" --devices "$devices" --rounds 3 --repeat 5 --warm-up 0.2 \
    --json "$folder/launch_modes.json"
}

search() {
  for shape in "${shapes[@]}"; do
    # What tune finds stays in a cache of its own, or the default's run would take it.
    step "tune_$shape" 590 env UNIEP_CACHE_DIR="$folder/tuned" "$uniep" tune --engine cuda --ranks "$gpus" --devices "$devices" --shape "$shape" --tokens 8192 \
      --candidates 40 --budget 90 --export "$folder/tuned_$shape.json" --json "$folder/tune_$shape.json"
    bench "tuned_$shape" --op layer --tokens 8192 --shape "$shape" --warm-up 0.2 --only layer --tuned "$folder/tuned_$shape.json"
    bench "default_$shape" --op layer --tokens 8192 --shape "$shape" --warm-up 0.2 --only layer
  done
  step online 590 "$uniep" bench --engine cuda --op layer --ranks "$gpus" --devices "$devices" --shape qwen3-235b --tokens 8192 --tune online \
    --begin queue=static,order.interleave=mixed,order.experts_per_wave=8 --json "$folder/online.json"
  step calibrate 180 "$uniep" calibrate --ranks 2 --devices 0,1 --out "$folder/machine.json" --raw "$folder/machine_raw.json"
}

timelines() {
  for shape in qwen3-235b qwen3-30b; do
    for op in layer backward; do
      step "timeline_${op}_$shape" 180 "$uniep" bench --op "$op" --ranks "$gpus" --devices "$devices" --shape "$shape" \
        --tokens 8192 --warm-up 0.2 --only layer --trace "$folder/timeline_${op}_$shape.trace"
    done
  done
}

failures() {
  local two=(env "CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${visible_gpus[*]:0:2}")")
  # Faults that have a line are not run again.
  step mutants_signals 590 "${two[@]}" "$here/mutants.sh" "$build" "$folder/mutants" --first 0 --count 30
  step mutants_copies 590 "${two[@]}" "$here/mutants.sh" "$build" "$folder/mutants" --first 30 --count 25
  step mutants_rest 590 "${two[@]}" "$here/mutants.sh" "$build" "$folder/mutants" --first 55
  for idiom in 0 1 2 3 4 5; do
    step "litmus_$idiom" 300 "${two[@]}" "$(program litmus)" --idiom "$idiom" --rounds 1e8
  done
  for layer in epilogue push staged gradients mixed redispatch; do
    step "skew_$layer" 300 "${two[@]}" "$(program mutant)" --run "unmutated-$layer" --devices 2 --seconds 150
  done
  step disturbed 590 "${two[@]}" "$(program layer)" --direction both --only random --cases 40 --devices 2 --disturb 1
  step aborts 300 "${two[@]}" "$(program abort)"
  step moments 590 "${two[@]}" "$(program failure)" --moments 60
  step sanitizers 590 "${two[@]}" "$here/sanitize_gpus.sh" "$build" "$folder/sanitizers" 250
  step soak 590 "${two[@]}" "$here/soak_gpus.sh" "$build" "$folder/soak" 330
}

for part in "${parts[@]}"; do "$part"; done
[ $failed -eq 0 ] || exit 1
[ $left -eq 0 ] || exit 3
