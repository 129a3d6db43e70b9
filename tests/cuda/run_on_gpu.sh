#!/bin/bash
# Builds the Hopper engine, its GPU tests straight from the sources, then runs the tests.
# Usage: tests/cuda/run_on_gpu.sh [BUILD_FOLDER]; needs g++ with C++20, cmake and the CUDA toolkit's headers.
# Nothing else: no GoogleTest, no network. UNIEP_BOUNDED_WAITS=1 makes every device-side wait end in a message.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "${1:-build-gpu}"
build=$(cd "${1:-build-gpu}" && pwd)
cuda=${CUDA_HOME:-/usr/local/cuda}
names=$(cd src && ls -1 model/{activation,dense_routing,portability,elementwise,row_table,routing_check,token_order}.h \
  program/{stage,tile_order,rank_program,gemm_queues,kernel_memory,order,edges,program_tables}.h engine/cuda/device/*/*.{h,cu} | tr '\n' ';')
names+="uniep/bfloat16.h;uniep/direction.h"
cmake "-DROOT=$PWD" "-DOUTPUT=$build/embedded_sources.cpp" "-DFILES=$names" -P src/engine/cuda/runtime/embed_sources.cmake
flags="-std=c++20 -O2 -ffp-contract=off -fPIC -I. -Iinclude -Isrc -isystem $cuda/include"
# Those that compare with the whole library come out of its own build (tests/cuda/CMakeLists.txt).
tests="tests/cuda/gpu_ptx_tests.cpp tests/cuda/gpu_gemm_tests.cpp tests/cuda/gpu_comm_tests.cpp"
sources=$(find src/engine/cuda/runtime src/engine/cuda/kernels src/engine/cuda/memory/signals.cpp src/io/cache_folder.cpp src/comm -name "*.cpp" | grep -v unavailable | sort)
for file in $sources "$build/embedded_sources.cpp" $tests; do
  echo "$file"
done | xargs -P "$(nproc)" -I{} sh -c "g++ $flags -c {} -o '$build'/\$(basename {} .cpp).o"
objects=$(for file in $sources; do echo "$build/$(basename "$file" .cpp).o"; done)
for test in $tests; do
  name=$(basename "$test" .cpp)
  g++ "$build/$name.o" $objects "$build/embedded_sources.o" -o "$build/$name" -ldl -lpthread
done
export UNIEP_TEST_KERNELS=$PWD/tests/cuda
if [ "${UNIEP_RUN_TESTS:-1}" = 1 ]; then
  for test in $tests; do "$build/$(basename "$test" .cpp)" --verbose; done
fi
