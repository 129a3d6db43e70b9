#!/usr/bin/env bash
# Builds the wheel for older C libraries, glibc 2.28 and newer (RHEL 8, Debian 10, Ubuntu 20.04), in build/dist:
#   scripts/old_glibc_wheel.sh
# The compiler is the clang of the package index's ziglang, which links against the symbols of any glibc. About ten
# minutes on two cores. Where scripts/python_tests.sh has made an environment with PyTorch, the wheel also runs a layer.
set -euo pipefail
cd "$(dirname "$0")/.."

glibc=2.28
ziglang=0.17.1
work=$PWD/build/old-glibc
dist=$PWD/build/dist
tested=${UNIEP_PYTHON_ENVIRONMENT:-build/python}/bin/python
fail() {
  echo "old glibc wheel: $1" >&2
  exit 1
}

python=${UNIEP_PYTHON:-$([ -x "$tested" ] && echo "$tested" || echo python3)}
rm -rf "$work"
mkdir -p "$work/compiler" "$work/sdist" "$dist"
"$python" -m venv "$work/tools"
PATH=$work/tools/bin:$PATH
pip install --quiet --disable-pip-version-check build wheel "scikit-build-core>=0.10" "nvidia-cuda-runtime>=13,<14" "ziglang==$ziglang"
for name in cc c++; do
  printf '#!/bin/sh\nexec "%s" -m ziglang %s -target x86_64-linux-gnu.%s "$@"\n' "$work/tools/bin/python" "$name" "$glibc" \
    >"$work/compiler/$name"
done
chmod +x "$work/compiler"/*

python -m build --sdist --no-isolation --outdir "$work/sdist" . >"$work/sdist.log" 2>&1 || fail "no source distribution: $work/sdist.log"
# Its linker does not know --push-state, with which CMake would take a whole archive.
define=cmake.define.CMAKE_CXX_LINK_LIBRARY_USING_WHOLE_ARCHIVE
begin=$SECONDS
CC=$work/compiler/cc CXX=$work/compiler/c++ pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --config-settings "build-dir=$work/objects" \
  --config-settings cmake.define.CMAKE_DISABLE_FIND_PACKAGE_fmt=ON \
  --config-settings cmake.define.CMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON \
  --config-settings "$define=-Wl,--whole-archive;<LINK_ITEM>;-Wl,--no-whole-archive" \
  --config-settings "${define}_SUPPORTED=TRUE" \
  --wheel-dir "$work" "$work"/sdist/*.tar.gz
tagged=$(cd "$work" && python -m wheel tags --remove --platform-tag "manylinux_${glibc//./_}_x86_64" uniep-*.whl)
mkdir "$work/unpacked"
(cd "$work/unpacked" && python -m zipfile -e "$work/$tagged" .)
library=$(find "$work/unpacked" -name 'libuniep.so*' -type f | head -n 1)
needed=$(objdump -T "$library" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -n 1)
[ "$(printf '%s\n' "$needed" "$glibc" | sort -V | tail -n 1)" = "$glibc" ] || fail "glibc $needed is needed; $glibc is promised"
if [ -x "$tested" ] && "$tested" -c 'import torch' 2>/dev/null; then
  PYTHONPATH=$work/unpacked "$tested" - <<'CODE' || fail "the wheel runs no layer"
import torch, uniep
x, w1, w2 = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((4, 16), (2, 16, 16), (2, 16, 8)))
y = uniep.moe(x, torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1), w1, w2)
assert y.shape == x.shape and bool((y == y[0, 0]).all())
CODE
fi
mv "$work/$tagged" "$dist/"
echo "old glibc wheel: $tagged, $(stat -c %s "$dist/$tagged") bytes, needs glibc $needed, built in $((SECONDS - begin)) s"
