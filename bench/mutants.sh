#!/bin/bash
# Plants each fault of tests/cuda/kernel_mutants.h into the kernels and says whether the layer that should tell of it
# does: a line a fault, and a total. About twelve minutes on one Hopper GPU, with two minutes of compiling on 16 cores.
# Usage: bench/mutants.sh BUILD [FOLDER [OPTION...]]
#   BUILD   holds tests (or uniep_gpu_mutant_tests itself)
#   FOLDER  takes mutants.txt, the lines: a run that was cut goes on behind them; and mutants.log, with the first
#           difference or error of each. Default: a new one in /tmp
#   OPTION  of uniep_gpu_mutant_tests, such as --first 20 --count 20, --seconds 10, --only NAME,NAME
# On two GPUs ranks are dealt over both, and faults join that one GPU hides; --devices 1 leaves those out.
# Exit status 1 where a fault survived that should not.
set -uo pipefail
build=$(realpath "$1")
folder=${2:-$(mktemp -d)}
shift $(($# < 2 ? $# : 2))
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/built.sh
. "$here/built.sh"
[ "$gpus" -gt 2 ] && gpus=2
export UNIEP_TEST_KERNELS=${UNIEP_TEST_KERNELS:-$here/../tests/cuda}
mkdir -p "$folder"
"$(program mutant)" --devices "$gpus" --results "$folder/mutants.txt" "$@" | tee -a "$folder/mutants.log" |
  grep --line-buffered -vE '^call [0-9]+:|^[0-9]+ calls$'
status=${PIPESTATUS[0]}
echo "lines and log in $folder"
exit "$status"
