#!/bin/bash
# What is to be seen on a machine with several Hopper GPUs, all of them, in parts, most valuable first. Each part is a row
# of steps with a limit each; a step that has passed is not run again, so that a run that was cut goes on where it was.
# Usage: bench/several_gpus.sh BUILD FOLDER [PART...]
#   BUILD    holds uniep, libuniep.so and tests (or the programs themselves, all in one folder)
#   FOLDER   takes of each step a log, its JSON and, once it has passed, NAME.done; on another machine bench/pack.sh brings it there
#   PART     default all, in this order:
#     pilot      whole models in Megatron-core with each MoE layer that is here; needs torch, megatron-core, numpy and pyyaml
#     bytes      tests that several GPUs can show something in, in one process and with a process a GPU
#     layers     whole layers beside torch's GEMMs, NCCL and DeepEP, uniform and zipf:1, with their bytes
#     exchange   dispatch and combine alone by SMs
#     model      launch modes, and layers as a model calls them, forward and backward
#     search     the machine's description; default, auto and tune; a job that tunes itself; on one and two GPUs Schedules that nobody
#                chose, for the simulator's errors
#     timelines  of forward and backward, for Perfetto and `uniep trace`
#     failures   what two GPUs are enough for: faults planted into kernels, litmus tests, layers under delays, aborts, graphs,
#                backward's cases, sanitizers and a soak
#     gemms      the grouped GEMMs beside torch's
# UNIEP_BENCH_SECONDS (default 0: no end): the run ends after so many seconds, and up to 40 more in which a step may end by itself.
# A step that this cuts, or has no third of its limit for, is left for the next run; long ones keep what they have measured.
# UNIEP_BENCH_STEPS (default all): an extended regular expression; steps whose names do not match it are passed over.
# PILOT_LAYERS (8), PILOT_TURNS (4), PILOT_STEPS (75), PILOT_CURVE_STEPS (300): of the pilot's models.
# ALLOW_MISSING=1: goes on where a module does not import that a layer beside ours needs.
# Prints a line a step. Exit status 1 where one failed, 3 where some are left to be run. python3 must have torch. What needs no GPU
# and is made of FOLDER afterwards: bench/after_several_gpus.sh.
set -uo pipefail
all=(pilot bytes layers exchange model search timelines failures gemms)
if [ $# -lt 2 ]; then
  sed -n '2,25s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
build=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
shift 2
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
  [[ " ${all[*]} " == *" $part "* ]] || {
    echo "PART: $part; legal are ${all[*]}" >&2
    exit 2
  }
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

# The other layers are what ours is measured beside: without them a run on borrowed GPUs is lost.
modules=()
[[ " ${parts[*]} " == *" pilot "* ]] && modules+=(megatron.core yaml transformer_engine)
[[ " ${parts[*]} " =~ " "(pilot|layers|exchange)" " ]] && modules+=(deep_ep)
if [ ${#modules[@]} -gt 0 ] && [ "${ALLOW_MISSING:-0}" != 1 ]; then
  python3 - "${modules[@]}" >&2 <<'END' || exit 2
import importlib, sys
missing = False
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        missing = True
        print(f"{name} does not import: {error!r}; ALLOW_MISSING=1 goes on without")
sys.exit(missing)
END
fi

is_wanted() { [ ! -e "$folder/$1.done" ] && [[ $1 =~ ${UNIEP_BENCH_STEPS:-} ]]; }

# attempt NAME SECONDS COMMAND...: whether it passed
attempt() {
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  local rest=$limit results=${goes_on:+$folder/$goes_on} had=0 has=0
  [ ! -e "$results" ] || had=$(wc -l <"$results")
  if [ "$seconds" -gt 0 ] && [ $((begin + limit)) -gt "$seconds" ]; then rest=$((seconds - begin)); fi
  [ $((3 * rest)) -lt "$limit" ] || timeout -k 40 "$rest" "$@" >"$folder/$name.log" 2>&1 || status=$?
  [ ! -e "$results" ] || has=$(wc -l <"$results")
  if [ $((3 * rest)) -lt "$limit" ] ||
    { { [ "$rest" -lt "$limit" ] || [ "$has" -gt "$had" ]; } && { [ $status -eq 124 ] || [ $status -eq 137 ]; }; }; then
    printf 'left    %4d s  %s (up to %d s)\n' $((SECONDS - begin)) "$name" "$limit"
    left=1
  elif [ $status -eq 0 ]; then
    printf 'ok      %4d s  %s  %s\n' $((SECONDS - begin)) "$name" "$(tail -n 1 "$folder/$name.log" | cut -c1-140)"
    return 0
  elif [ $status -eq 77 ]; then
    printf 'skipped %4d s  %s\n' $((SECONDS - begin)) "$name"
  else
    failed=1
    printf 'FAIL    %4d s  %s (status %d)\n%s\n' $((SECONDS - begin)) "$name" "$status" "$(tail -n 4 "$folder/$name.log" | cut -c1-300)"
  fi
  return 1
}

step() {
  if is_wanted "$1" && attempt "$@"; then touch "$folder/$1.done"; fi
}

# goes_on FILE NAME SECONDS COMMAND...: a step that takes several runs. Cut by its limit it is left where FILE has more lines by then.
goes_on() {
  local goes_on=$1
  step "${@:2}"
}

# compile "STEP..." SECONDS COMMAND...: kernels of these steps, if one of them is to be run. Never .done: the next machine has none.
compile() {
  local name
  for name in $1; do
    if is_wanted "$name"; then
      attempt "compile_$name" "${@:2}"
      return
    fi
  done
}

bench() {
  local name=$1
  shift
  step "$name" 180 "$uniep" bench --ranks "$gpus" --devices "$devices" --json "$folder/$name.json" "$@"
}

beside_others() {
  local name=$1
  shift
  step "$name" 590 python3 "$here/compare_layers.py" "$uniep" --rounds 2 --json "$folder/$name.jsonl" "$@"
}

# Of the tests that draw layers: `drawn NAME OPTION...`.
drawn() {
  local name=$1 command
  command=("$(program layer)" --direction both --any-kernel --launch random --devices "$gpus" "${@:2}")
  compile "$name" 590 "${command[@]}" --compile "$(nproc)"
  step "$name" 480 "${command[@]}"
}

pilot() {
  local run=(torchrun --nproc-per-node "$gpus" -m uniep.pilot --resume --reserve-sms '')
  local layers=(--layers "${PILOT_LAYERS:-8}") turns=(--turns "${PILOT_TURNS:-4}" --steps "${PILOT_STEPS:-75}" --warm 3)
  for model in qwen3-30b deepseek-v2-lite; do
    compile "pilot_$model pilot_curves_$model" 300 "$uniep" compile --engine cuda --shape "$model" --ranks "$gpus" --tokens 4096 \
      --wgrad main_grad --op layer --out "${UNIEP_CACHE_DIR:-$HOME/.cache/uniep}"
    step "pilot_$model" 590 "${run[@]}" --model "$model" "${layers[@]}" "${turns[@]}" --parts preflight,turns --out "$folder/pilot_$model"
    step "pilot_curves_$model" 590 "${run[@]}" --model "$model" "${layers[@]}" --arms stock,uniep --parts curves \
      --curve-steps "${PILOT_CURVE_STEPS:-300}" --out "$folder/pilot_curves_$model"
  done
  step pilot_bits 300 env NCCL_ALGO=Ring "${run[@]}" --model qwen3-30b --layers 1 --turns 1 \
    --steps 4 --warm 2 --arms stock,uniep --parts deterministic,bits,kill --bit-layers 1 --bit-steps 4 --out "$folder/pilot_bits"
  if python3 -c 'import transformer_engine' 2>/dev/null; then
    step pilot_graphs 590 "${run[@]}" --model qwen3-30b "${layers[@]}" "${turns[@]}" --parts turns --cuda-graphs --out "$folder/pilot_graphs"
  fi
}

bytes() {
  local repeated=("$(program model)" --devices "$gpus" --models qwen3-30b --tokens 1024 --repeat 1000)
  step comm 120 "$(program comm)" --ranks "$gpus"
  step comm_processes 120 "$(program comm)" --ranks "$gpus" --processes
  for first in 30000 30025 30050 30075; do drawn "layers_drawn_$first" --only random --cases 25 --first "$first"; done
  for shape in qwen3-30b qwen3-235b mixtral dsv3; do
    step "same_bytes_$shape" 480 python3 "$here/same_bytes.py" "$uniep" --ranks "$gpus" --shapes "$shape"
  done
  step one_rank_or_all 300 "$uniep" train --engine cuda --ranks "$gpus" --devices "$devices" --experts $((4 * gpus)) --steps 40 \
    --hidden 256 --intermediate 128 --compare sequential
  for shape in qwen3-30b qwen3-235b mixtral dsv3; do
    step "models_$shape" 590 "$(program model)" --devices "$gpus" --models "$shape"
  done
  drawn activations_drawn --only activations --cases 24 --first 30000
  drawn wide_drawn --only wide --cases 100 --first 30000
  step models_long 590 "$(program model)" --devices "$gpus" --models qwen3-30b --tokens 32768
  step models_repeated 590 "${repeated[@]}" --op forward --schedules \
    'fusion=layer;fusion=pairs;fusion=none;dispatch.transport=push;comm.where=sms,combine.transport=staged'
  step models_repeated_backward 590 "${repeated[@]}" --op backward --schedules-backward \
    'fusion=pairs,dispatch.transport=pull;fusion=layer;backward.wgrad=mixed'
  step launches 590 "$here/../tests/cuda/compare_launches.sh" "$uniep" "$gpus"
  step cli_bench 300 "$(built tests/cli_tests)" --gtest_filter='BenchCommand.*'
  step cli_run 300 "$(built tests/cli_tests)" --gtest_filter='Run.*'
  step exchange_tests 300 "$(program exchange)"
  step place 300 "$(program place)"
  step place_failure 120 "$(program place_failure)"
  step failure 590 "$(program failure)"
  step coexistence 120 "$(program coexistence)"
  step python 590 torchrun --nproc-per-node "$gpus" "$here/../python/tests/gpu_checks.py"
}

layers() {
  local ops=(forward backward step)
  for op in "${ops[@]}"; do beside_others "layers_$op" --op "$op" --tokens 8192; done
  for shape in "${shapes[@]}"; do
    beside_others "layers_processes_$shape" --op forward,backward,step --tokens 8192 --processes --shapes "$shape"
  done
  for op in "${ops[@]}"; do beside_others "layers_zipf_$op" --op "$op" --tokens 8192 --routing zipf:1; done
  for op in "${ops[@]}"; do beside_others "layers_${op}_4096" --op "$op" --tokens 4096; done
  for shape in "${shapes[@]}"; do
    beside_others "layers_processes_${shape}_4096" --op forward,backward,step --tokens 4096 --processes --shapes "$shape"
  done
  for op in "${ops[@]}"; do beside_others "layers_${op}_after_pauses" --op "$op" --tokens 8192 --warm-up 0; done
  step ways 590 python3 "$here/backward_ways.py" "$uniep" --ranks "$gpus" --ways 'plain,+= main_grad,redispatch,recompute,later' \
    --rounds 2 --repeat 8 --json "$folder/ways.jsonl"
}

exchange() {
  local sizes=(--tokens 4096 --hidden 7168 --experts 256 --topk 8)
  step exchange_beside_others 300 python3 "$here/compare_exchange.py" "$uniep" --json "$folder/exchange_beside_others.json"
  bench dispatch --op dispatch "${sizes[@]}"
  bench combine_flat --op combine "${sizes[@]}"
  bench combine_groups --op combine "${sizes[@]}" --combine-groups "$gpus"
}

model() {
  step model_calls 590 torchrun --nproc-per-node "$gpus" "$here/model_calls.py" --json "$folder/model_calls.jsonl"
  step launch_modes 590 python3 "$here/launch_modes.py" "$uniep" --devices "$devices" --rounds 3 --repeat 5 --warm-up 0.2 \
    --json "$folder/launch_modes.jsonl"
  step training_layer 590 python3 "$here/training_layer.py" "$uniep" --rounds 3 --warm-up 0.6 --json "$folder/training_layer.jsonl"
}

search() {
  local machine=()
  local searching=("$here/with_cache.sh" "$searched" "$folder/tuned")
  local layer=(--op layer --tokens 8192 --warm-up 0.2 --only layer)
  step calibrate 180 "$uniep" calibrate --ranks 2 --devices 0,1 --out "$folder/machine.json" --raw "$folder/machine_raw.json"
  if [ -e "$folder/machine.json" ]; then machine=(--machine machine.json); fi
  for direction in forward backward; do
    goes_on "gain_$direction.jsonl" "gain_$direction" 590 env -C "$folder" "${searching[@]}" python3 "$here/search_gain.py" "$uniep" --direction "$direction" \
      --shapes "$(IFS=/; echo "${shapes[*]}")" --json "gain_$direction.jsonl" "${machine[@]}"
  done
  for shape in "${shapes[@]}"; do
    is_wanted "default_$shape" && "$uniep" schedule --engine cuda --ranks "$gpus" --shape "$shape" --tokens 8192 --direction forward \
      >"$folder/schedule_$shape.json"
    bench "default_$shape" "${layer[@]}" --shape "$shape" --schedule "$folder/schedule_$shape.json"
    bench "auto_$shape" "${layer[@]}" --shape "$shape"
    step "tune_$shape" 590 env -C "$folder" "${searching[@]}" "$uniep" tune --engine cuda --ranks "$gpus" --devices "$devices" \
      --shape "$shape" --tokens 8192 --candidates 40 --budget 90 --export "export_$shape.json" --json "tune_$shape.json" "${machine[@]}"
    [ -e "$folder/tune_$shape.done" ] && bench "tuned_$shape" "${layer[@]}" --shape "$shape" --tuned "$folder/export_$shape.json"
  done
  step online 590 "${searching[@]}" "$uniep" bench --engine cuda --op layer --ranks "$gpus" --devices "$devices" --shape qwen3-235b \
    --tokens 8192 --tune online --begin queue=static,order.interleave=mixed,order.experts_per_wave=8 --json "$folder/online.json"
  local points=(env -C "$folder" python3 "$here/measure_points.py" "$uniep" --budget 4 --json points.jsonl)
  for ranks in 1 2; do goes_on points.jsonl "points_$ranks" 590 "${points[@]}" --ranks $ranks; done
  goes_on points.jsonl points_backward 590 "${points[@]}" --ranks 2 --direction backward \
    --sets 4096,1536,32,8:8192:uniform 2048,768,32,8:8192:uniform 7168,2048,64,8:8192:uniform
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
  local disturbed=("${two[@]}" "$(program layer)" --direction both --only random --cases 40 --devices 2 --disturb 1)
  compile backward 590 "$(program backward)" --compile "$(nproc)"
  step backward 590 "${two[@]}" "$(program backward)" --processes
  step graph 590 "${two[@]}" "$(program graph)" --processes
  step groups 480 "${two[@]}" "$(program groups)"
  step input 120 "${two[@]}" "$(program input)" --processes
  step call_timer 120 "${two[@]}" "$(program call_timer)"
  step lend 120 "$(program lend)"
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
  compile disturbed 590 "${disturbed[@]}" --compile "$(nproc)"
  step disturbed 590 "${disturbed[@]}"
  step aborts 300 "${two[@]}" "$(program abort)"
  step moments 590 "${two[@]}" "$(program failure)" --moments 60
  step sanitizers 590 "${two[@]}" "$here/sanitize_gpus.sh" "$build" "$folder/sanitizers" 250
  local soak=540
  if [ "$seconds" -gt 0 ] && [ $((seconds - SECONDS)) -lt $soak ]; then soak=$((seconds - SECONDS)); fi
  step soak 590 "${two[@]}" "$here/soak_gpus.sh" "$build" "$folder/soak" "$soak"
}

gemms() {
  local turns=("$here/compare.py" "$uniep" --repeat 40 --rounds 1)
  step gemms 590 python3 "${turns[@]}" --json "$folder/gemms.jsonl"
  step gemms_from_idle 590 python3 "${turns[@]}" --warm-up 0 --json "$folder/gemms_from_idle.jsonl"
}

# What searches find; else each would take the last one's choice for the default. It takes their kernels from where all keep them.
searched=$(mktemp -d)
trap 'rm -rf "$searched"' EXIT
for part in "${parts[@]}"; do "$part"; done
[ $failed -eq 0 ] || exit 1
[ $left -eq 0 ] || exit 3
