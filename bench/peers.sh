#!/bin/bash
# What the pilot's other arms need on one host of Hopper GPUs: Megatron-core and Transformer Engine from the package
# index, DeepEP and Hybrid-EP from a clone of DeepEP's repository. Takes some 35 core minutes; no GPU is needed for it.
# Usage: bench/peers.sh FOLDER CLONE
#   FOLDER takes sources, builds, and in FOLDER/site what goes on PYTHONPATH
#   CLONE  is DeepEP's repository, with the commits of its branch hybrid-ep; it is read only
# Needs python3 with torch (CUDA 13), pybind11, setuptools, wheel and ninja; nvcc, git and g++. Set MAX_JOBS to bound
# what is compiled at once. DeepEP is built without NVSHMEM, so it serves one host.
set -euo pipefail
if [ $# -ne 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
megatron=0.19.2
transformer_engine=2.20.2
deepep=94a9f8f6b146c07d97ec58f67cd6d303296d6098 # of the branch hybrid-ep, which has both
mkdir -p "$1/site"
folder=$(realpath "$1") checkout=$2
export CC=${CC:-/usr/bin/gcc} CXX=${CXX:-/usr/bin/g++} CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export PATH=$CUDA_HOME/bin:$PATH TORCH_CUDA_ARCH_LIST=9.0
libraries=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia"))')
export CPATH=$libraries/cudnn/include:$libraries/nccl/include:$CUDA_HOME/include/cccl
export LIBRARY_PATH=$CUDA_HOME/lib64/stubs:$CUDA_HOME/lib64

python3 -m pip install --quiet --upgrade --no-deps --target "$folder/site" "megatron-core==$megatron" \
  "transformer-engine==$transformer_engine" nvdlfw-inspect==0.2.2 pydantic==2.14.4 pydantic-core==2.50.5 \
  annotated-types==0.8.0 typing-inspection==0.4.5 importlib-metadata==10.2.0 zipp==4.1.2 einops==0.8.2 onnx==1.23.2 \
  onnxscript==0.7.2 onnx-ir==1.1.0 ml-dtypes==0.6.0
# The package index has the core library apart, with files in the same folder.
mkdir -p "$folder/wheels"
python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$folder/wheels" "transformer-engine-cu13==$transformer_engine"
python3 -m zipfile -e "$folder"/wheels/transformer_engine_cu13-$transformer_engine-*.whl "$folder/site"

# Its torch extension comes as source.
source=$folder/transformer_engine_torch-$transformer_engine
if [ ! -d "$source" ]; then
  python3 -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$folder/wheels" \
    "transformer-engine-torch==$transformer_engine"
  tar xf "$folder"/wheels/transformer_engine_torch-$transformer_engine.tar.gz -C "$folder"
fi
(cd "$source" && NVTE_WITH_NCCL_EP=0 NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS=90 \
  python3 setup.py --quiet build --build-lib "$folder/built")
cp "$folder"/built/transformer_engine/wheel_lib/transformer_engine_torch*.so "$folder/site/transformer_engine/wheel_lib/"

if [ ! -d "$folder/DeepEP" ]; then
  git clone --quiet "$checkout" "$folder/DeepEP"
  git -C "$folder/DeepEP" checkout --quiet "$deepep"
  # Without NVSHMEM, for which alone it needs -rdc. Megatron asks for the size of the buffer between hosts: 0 here.
  python3 - "$folder/DeepEP" <<'PYTHON'
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
def change(name, pairs):
    text = (folder / name).read_text()
    for old, new in pairs:
        assert old in text, f"{name}: {old!r} is not there; another commit?"
        text = text.replace(old, new, 1)
    (folder / name).write_text(text)
change("setup.py", [
    ("deep_ep_cpp():\n    disable_nvshmem = False\n", "deep_ep_cpp():\n    disable_nvshmem = True\n"),
    ("    if nvshmem_dir is None:\n", "    if not disable_nvshmem and nvshmem_dir is None:\n"),
    ("    else:\n        disable_nvshmem = False\n", "\n"),
    ("'-rdc=true', ", ""),
])
change("csrc/config.hpp", [('EP_HOST_ASSERT(false and "NVSHMEM is disable during compilation");', "return 0;")])
PYTHON
fi
(cd "$folder/DeepEP" && DISABLE_AGGRESSIVE_PTX_INSTRS=0 python3 setup.py --quiet build --build-lib "$folder/site")
echo "export PYTHONPATH=$folder/site:\$PYTHONPATH"
