#!/bin/bash
# What is to be seen on a machine with several Hopper GPUs: the symmetric memory over NCCL, a process a GPU, in all three
# ways into a group, and in one process; the layer with a process a GPU and in one process; then the grouped GEMMs of all
# GPUs at once beside torch's, and whole layers.
# Usage: bench/several_gpus.sh UNIEP GPU_COMM_TESTS [FOLDER]   (the two programs; the folder takes two JSON files)
# Needs python3 with torch, and NCCL where the dynamic linker or torch finds it.
set -euo pipefail
uniep=$1
comm_tests=$2
folder=${3:-.}
gpus=$(nvidia-smi --list-gpus | wc -l)
here=$(cd "$(dirname "$0")" && pwd)
export UNIEP_TEST_KERNELS=${UNIEP_TEST_KERNELS:-$here/../tests/cuda}
if [ -z "${UNIEP_LIBNCCL:-}" ]; then
  torchs=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' || true)
  [ -e "$torchs" ] && export UNIEP_LIBNCCL=$torchs
fi
timeout 120 "$comm_tests" --ranks "$gpus" --nccl
timeout 120 "$comm_tests" --ranks "$gpus"
"$here/../tests/cuda/compare_launches.sh" "$uniep" "$gpus"
timeout 420 python3 "$here/compare.py" "$uniep" --json "$folder/compare.json"
timeout 420 python3 "$here/compare_layers.py" "$uniep" --json "$folder/compare_layers.json"
