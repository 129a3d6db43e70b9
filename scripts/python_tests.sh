#!/usr/bin/env bash
# Checks the Python package with ruff and mypy, and runs its tests against the library of a build:
#   scripts/python_tests.sh [BUILD_DIR] [pytest's arguments]
#   scripts/python_tests.sh --install                           makes the environment for later runs, and no more
# They run in an environment with python/requirements-test.txt, made on first use in build/python (or in
# UNIEP_PYTHON_ENVIRONMENT) by the first of UNIEP_PYTHON, python3.12, pyenv's and python3 that is Python 3.10 or newer.
# Where none of these or the package index has what is needed, says so and succeeds. Megatron-core needs Python 3.12:
# where there is one and CI is set, all has to be there, and nothing is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

install_only=0
if [ "${1:-}" = --install ]; then
  install_only=1
  shift
fi
build=$(realpath -m "${1:-build/release}")
shift || true
environment=${UNIEP_PYTHON_ENVIRONMENT:-build/python}
requirements=python/requirements-test.txt
other_megatrons=(0.17.1 0.18.2) # beside the one of the requirements; python/tests/test_megatron.py

# A shim on PATH may be there and fail.
find_python() {
  local candidate
  for candidate in "${UNIEP_PYTHON:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python python3 python3.13 python3.11 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[0-9]*/bin/python; do
    if [ -n "$candidate" ] && "$candidate" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < ($1))" \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
}

required=0
if [ -n "${CI:-}" ] && [ -n "$(find_python '3, 12')" ]; then
  required=1
fi

skip() {
  echo "python tests: $([ "$required" = 1 ] && echo failed || echo skipped): $1"
  exit "$required"
}

wanted=$(cat "$requirements" - <<<"${other_megatrons[*]}" | sha256sum)
if [ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ]; then
  python=$(find_python '3, 10')
  [ -n "$python" ] || skip "no Python from 3.10 on with venv and ensurepip"
  echo "python tests: installing $requirements in $environment"
  rm -rf "$environment"
  "$python" -m venv "$environment"
  pip() {
    "$environment/bin/python" -I -m pip install --quiet --disable-pip-version-check "$@" >>"$environment/install.log" 2>&1 ||
      skip "$(grep -m 1 '^ERROR' "$environment/install.log" || echo "pip fails: see $environment/install.log")"
  }
  pip -r "$requirements"
  if "$environment/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    for version in "${other_megatrons[@]}"; do
      pip --no-deps --target "$environment/megatron/$version" "megatron-core==$version"
    done
  fi
  echo "$wanted" >"$environment/installed"
fi
[ "$install_only" = 0 ] || exit 0
"$environment/bin/ruff" check --no-cache
"$environment/bin/ruff" format --no-cache --check --quiet
"$environment/bin/mypy" --cache-dir "$environment/mypy"
UNIEP_MEGATRON_VERSIONS=$(realpath "$environment")/megatron UNIEP_REQUIRE_MEGATRON=$required \
  UNIEP_BUILD=$build UNIEP_LIBRARY=$build/libuniep.so PYTHONPATH=$PWD/python PYTHONDONTWRITEBYTECODE=1 \
  "$environment/bin/python" -m pytest -q -p no:cacheprovider python/tests "$@"
