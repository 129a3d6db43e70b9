#!/usr/bin/env bash
# Builds the Python package's source distribution and, from it, its wheel, in build/dist, and checks both:
#   scripts/python_wheel.sh
# The wheel is built with the source distribution's own copies of fmt and nlohmann-json, installed in an environment
# that has nothing else, and used from another folder; so is an editable install. Where scripts/python_tests.sh has made
# an environment with PyTorch, the wheel also runs a layer.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$PWD/build/python-wheel
dist=$PWD/build/dist
tested=${UNIEP_PYTHON_ENVIRONMENT:-build/python}/bin/python
largest=$((2 * 1000 * 1000))
fail() {
  echo "python wheel: $1" >&2
  exit 1
}

python=${UNIEP_PYTHON:-$([ -x "$tested" ] && echo "$tested" || echo python3)}
if [ ! -x "$work/tools/bin/pip" ]; then
  mkdir -p "$work"
  "$python" -m venv "$work/tools"
  "$work/tools/bin/pip" install --quiet --disable-pip-version-check build "scikit-build-core>=0.10" \
    "nvidia-cuda-runtime>=13,<14" || {
    rm -rf "$work/tools"
    echo "python wheel: skipped: no package index"
    exit 0
  }
fi
PATH=$work/tools/bin:$PATH
rm -rf "$dist" "$work/source" "$work/objects" "$work/bare" # files of an archive are older than objects of an earlier run

python -m build --sdist --no-isolation --outdir "$dist" . >"$work/sdist.log" 2>&1 || fail "no source distribution: $work/sdist.log"
sdist=$(echo "$dist"/uniep-*.tar.gz)
contents=$(tar tzf "$sdist")
for file in third_party/include/fmt/format.h third_party/include/nlohmann/json.hpp third_party/LICENSES.txt LICENSE \
  include/uniep/c_api.h include/uniep/c_layer.h python/uniep/__init__.py cmake/build_backend.py; do
  grep -q "^uniep-[^/]*/$file\$" <<<"$contents" || fail "$sdist has no $file"
done
[ ! -e third_party ] || fail "third_party is left behind"

mkdir "$work/source"
tar xzf "$sdist" --strip-components 1 -C "$work/source"
options=(--quiet --disable-pip-version-check --no-deps --no-build-isolation --config-settings "build-dir=$work/objects"
  --config-settings cmake.define.CMAKE_DISABLE_FIND_PACKAGE_fmt=ON
  --config-settings cmake.define.CMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
begin=$SECONDS
pip wheel "${options[@]}" --wheel-dir "$dist" "$work/source"
wheel=$(echo "$dist"/uniep-*.whl)
size=$(stat -c %s "$wheel")
echo "python wheel: $(basename "$wheel"), $size bytes, built in $((SECONDS - begin)) s"
[ "$size" -lt "$largest" ] || fail "$size bytes; must be less than $largest"
[[ $wheel == *-py3-none-*.whl ]] || fail "$wheel is not for every Python 3"
grep -q "UNIEP_CUDA_INCLUDE:PATH=.*nvidia/cu13/include" "$work/objects/CMakeCache.txt" ||
  fail "cuda.h is not the package index's, so the cuda engine may be missing"

use='import uniep, uniep.library, pathlib
library = uniep.library.load()
assert library.uniep_version_string().decode() == uniep.__version__
try:
    uniep.Group
except ImportError as error:
    assert "pip install" in str(error)
else:
    raise SystemExit("torch is in the bare environment")
print("python wheel:", uniep.__path__[0], uniep.library.path())'
unset PYTHONPATH UNIEP_LIBRARY
python -m venv "$work/bare"
"$work/bare/bin/pip" install --quiet --disable-pip-version-check --no-index "$wheel"
(cd / && "$work/bare/bin/python" -c "$use" && "$work/bare/bin/python" -c 'import uniep; uniep.show_config()')
library=$(echo "$work"/bare/lib/python*/site-packages/uniep/libuniep.so)
others=$(nm -D --defined-only "$library" | awk '$3 !~ /^uniep_[a-z0-9_]+$/' | head -5)
[ -z "$others" ] || fail "exported beside the C API: $others"
echo "python wheel: needs $(objdump -T "$library" | grep -o 'GLIBC_2\.[0-9.]*' | sort -Vu | tail -1) or newer"

if "$tested" -c 'import torch' 2>/dev/null; then
  tested=$(realpath -s "$tested")
  (cd / && PYTHONPATH=$(echo "$work"/bare/lib/python*/site-packages) "$tested" -c 'import torch, uniep
layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2)
layer(torch.randn(16, 64).bfloat16()).sum().backward()
assert "site-packages" in uniep.__path__[0] and layer.experts.down_proj.grad.abs().max() > 0
print("python wheel: a layer runs")')
else
  echo "python wheel: no layer was run: $tested has no PyTorch"
fi

# Editable: the modules of the source tree, the library of the build.
pip install "${options[@]}" --editable "$work/source"
(cd / && python -c "$use
assert str(pathlib.Path(uniep.__file__)).startswith('$work/source/python'), uniep.__file__")
pip uninstall --quiet --yes uniep
