#!/usr/bin/env bash
# Checks the Python package with ruff and mypy, and runs its tests against the library of a build:
#   scripts/python_tests.sh [BUILD_DIR] [pytest's arguments]
# They run in an environment with python/requirements-test.txt, made on first use in build/python (or in
# UNIEP_PYTHON_ENVIRONMENT) by the first of UNIEP_PYTHON, python3.12, python3 and pyenv's that is Python 3.10 or newer.
# Where none of these or the package index has what is needed, says so and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."

build=$(realpath "${1:-build/release}")
shift || true
environment=${UNIEP_PYTHON_ENVIRONMENT:-build/python}
requirements=python/requirements-test.txt
skip() {
  echo "python tests: skipped: $1"
  exit 0
}

# A shim on PATH may be there and fail.
find_python() {
  local candidate
  for candidate in "${UNIEP_PYTHON:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python python3 python3.13 python3.11 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[0-9]*/bin/python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
}

wanted=$(sha256sum "$requirements")
if [ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ]; then
  python=$(find_python)
  [ -n "$python" ] || skip "no Python from 3.10 on with venv and ensurepip"
  echo "python tests: installing $requirements in $environment"
  rm -rf "$environment"
  "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" \
    >"$environment/install.log" 2>&1 ||
    skip "$(grep -m 1 '^ERROR' "$environment/install.log" || echo "pip fails: see $environment/install.log")"
  echo "$wanted" >"$environment/installed"
fi
"$environment/bin/ruff" check --no-cache
"$environment/bin/ruff" format --no-cache --check --quiet
"$environment/bin/mypy" --cache-dir "$environment/mypy"
UNIEP_BUILD=$build UNIEP_LIBRARY=$build/libuniep.so PYTHONPATH=$PWD/python PYTHONDONTWRITEBYTECODE=1 \
  "$environment/bin/python" -m pytest -q -p no:cacheprovider python/tests "$@"
