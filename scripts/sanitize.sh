#!/usr/bin/env bash
# Runs the tests under sanitizers; any report fails.
#   scripts/sanitize.sh thread [BUILD_DIR]              random layers, the engine's tests, faults that must be reported
#   scripts/sanitize.sh address,undefined [BUILD_DIR]   all tests
#   scripts/sanitize.sh --build ...                     builds them, and runs none
# UNIEP_TEST_COMBINATIONS and UNIEP_TEST_SEED say how many random layers, and from which on.
set -euo pipefail
cd "$(dirname "$0")/.."

build_only=0
if [ "${1:-}" = --build ]; then
  build_only=1
  shift
fi
sanitizers=${1:-}
case $sanitizers in
  thread) build=build/tsan combinations=120 ;;
  address,undefined) build=build/asan combinations=120 ;;
  *) echo "usage: scripts/sanitize.sh [--build] thread|address,undefined, not '$sanitizers'" >&2; exit 2 ;;
esac
build=${2:-$build}
export UNIEP_TEST_COMBINATIONS=${UNIEP_TEST_COMBINATIONS:-$combinations}

# Line tables only: reports name file and line. clang and lld need half of g++'s time and a quarter of ld's. With
# AddressSanitizer the tests and the command line have -O0 (CMakeLists.txt). Of UBSan's checks those of each pointer are
# left out whose faults AddressSanitizer sees where the pointer is used: they take a quarter of the compiler's time. The
# fuzzers have them (scripts/fuzz.sh). Without CUDA, whose libraries are not built for sanitizers.
tools=(-DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=lld)
[ "$sanitizers" = thread ] || tools+=("-DUNIEP_SANITIZE_EXCEPT=null,object-size,pointer-overflow,vptr")
cmake -G Ninja -S . -B "$build" "${tools[@]}" \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
  -DUNIEP_SANITIZE="$sanitizers" -DUNIEP_BUILD_BENCH=OFF -DUNIEP_CUDA_INCLUDE:PATH=OFF >/dev/null

if [ "$sanitizers" = thread ]; then
  cmake --build "$build" -j "$(nproc)" --target engine_tests
  [ "$build_only" = 0 ] || exit 0
  # Masked vector loads and stores are not instrumented, so only the portable kernels show every access.
  export UNIEP_INSTRUCTION_SET=portable TSAN_OPTIONS=exitcode=66:halt_on_error=1:second_deadlock_stack=1
  # Of the planted faults those that are no race; the others are the last check's. Ranks that are processes have limits
  # of time, so nothing runs beside them.
  suites=('Bitwise.*' 'CpuEngine.*' 'BoundedWait.*:*/ReorderedSum:*/SkippedPadding')
  printf '%s\0' "${suites[@]}" |
    xargs -0 -P "$(nproc)" -I{} "$build/tests/engine_tests" --gtest_brief=1 --gtest_filter={}
  "$build/tests/engine_tests" --gtest_brief=1 --gtest_filter='-Bitwise.*:CpuEngine.*:BoundedWait.*:Planted/*'
  tests/tsan_fault_check.sh "$build/tests/engine_tests"
else
  cmake --build "$build" -j "$(nproc)"
  [ "$build_only" = 0 ] || exit 0
  export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
  export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  # Proofs and comparisons over the space of Schedules, all measured layers and the fits to them, whole models, long
  # searches and what the fuzzers go through have their time in `make test`; other tests run the same code here.
  elsewhere=(
    BadFiles.Random BatchInvariance.ARanks Candidates.{HaveKernels,OfALayer} Calibrate.{ATurnsClock,Doubts,EightGpus,FindsOther,IsTheSame}
    Calibrate.{LayersFollow,LeavesAMachine,OfAKnownKind,PredictsWhat,Refits} CalibrateTraces.{AFileMay,BackwardSkew,Finds}
    CalibrateTraces.{LeavesAMachine,ManyRanks,TellsWhat} Canonical Checker.{Notices,PassesRandom} CheckerSpace CliCalibrateTraces.{FitsTimelines,RefusesTimelines,RefusesWhat} CliSimulate.WritesAPage
    ClosedForm.{IsNear,WithGroups} CountSpace CpuEngine.ThousandsOf Directions/SolveBothWays.PointsAre Edges.ExpertCounters EngineAgainstReference.Random FailuresPage
    GemmQueues.EveryTile GemmQueuesInTheSmall Machine.{EveryNumber,RefusesDeep,Truncated} ModelLayers Npy.Damaged
    Order.{SumsTake,Weight} Placement.{RowsStand,TokensAreSummed} PublishedFigures Run.LargeLayers ScheduleFill.{Any,GivenFields}
    ScheduleSample.Reaches ScheduleText.SurvivesHostile ScheduleValidate.AgreesWith Simulate.{AClock,OneRank,RunsEvery} SimulateError
    SolveCommand.{Knows,Nothing} SolverChoice.IsLegal TaskCosts.AreWhat TaskWork.{BytesMoved,GemmsAnd,Moves} TraceSvg.StaysSmall TuneReport.{SaysWhat,WhatIf} Tuner.{Finds,NeverTakes} TunerBackground.RanksThat Walk WeightGradientTimes.ProgramsWithout WgradQueues
  )
  # ctest compiles no expression with more than nine groups, and then runs all there is: so one, and each name is looked up.
  tests=$(ctest --test-dir "$build" -N)
  for name in "${elsewhere[@]}"; do
    grep -q ": $name" <<<"$tests" || { echo "scripts/sanitize.sh: no test's name begins with $name" >&2; exit 1; }
  done
  ctest --test-dir "$build" -j "$(nproc)" --output-on-failure -E "^($(IFS='|' && echo "${elsewhere[*]//./[.]}"))"
fi
