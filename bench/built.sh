# shellcheck shell=bash disable=SC2034,SC2154
# For the scripts beside it: where a program of `build` lies, which is a build folder or has all programs in itself; the GPUs
# that CUDA_VISIBLE_DEVICES leaves; NCCL.
built() {
  local file=$build/$1
  [ -e "$file" ] || file=$build/${1##*/}
  echo "$file"
}
program() { built "tests/cuda/uniep_gpu_$1_tests"; }
# Their numbers, as nvidia-smi and CUDA_VISIBLE_DEVICES have them.
mapfile -t visible_gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} 2>/dev/null)
gpus=${#visible_gpus[@]}
# NCCL as PyTorch brings it, where nobody names another one.
if [ -z "${UNIEP_LIBNCCL:-}" ]; then
  torchs_nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null || true)
  [ -e "$torchs_nccl" ] && export UNIEP_LIBNCCL=$torchs_nccl
fi
