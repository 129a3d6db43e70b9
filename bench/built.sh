# shellcheck shell=bash disable=SC2154
# For the scripts beside it: where a program of `build` lies, which is a build folder or has all programs in itself; NCCL.
built() {
  local file=$build/$1
  [ -e "$file" ] || file=$build/${1##*/}
  echo "$file"
}
program() { built "tests/cuda/uniep_gpu_$1_tests"; }
# NCCL as PyTorch brings it, where nobody names another one.
if [ -z "${UNIEP_LIBNCCL:-}" ]; then
  torchs_nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null || true)
  [ -e "$torchs_nccl" ] && export UNIEP_LIBNCCL=$torchs_nccl
fi
