# shellcheck shell=bash disable=SC2154
# For the scripts beside it: where a program of `build` lies, which is a build folder or has all programs in itself.
built() {
  local file=$build/$1
  [ -e "$file" ] || file=$build/${1##*/}
  echo "$file"
}
program() { built "tests/cuda/uniep_gpu_$1_tests"; }
