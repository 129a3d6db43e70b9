#!/usr/bin/env bash
# Runs clang-tidy (.clang-tidy says which checks) over src/, tests/ and examples/; any warning fails.
#   scripts/tidy.sh [--alone] [BUILD_DIR=build/tidy]    which it configures, and nothing is built there
# A folder's sources are read as one, as the compiler reads them (cmake/unity.cmake), in a seventh of the time. --alone reads
# each by itself: so it is seen that each includes what it needs. What was clean is not looked at again until its
# preprocessed text, its flags or the checks change.
# clang-tidy comes from the package index, into build/clang-tidy on first use, with UNIEP_PYTHON, the Python tests' Python
# or python3: from version 22 on it leaves system headers out, and takes a third of the time of Debian's.
set -euo pipefail
cd "$(dirname "$0")/.."

version=23.1.4
unity=ON
if [ "${1:-}" = --alone ]; then
  unity=OFF
  shift
fi
build=$(realpath -m "${1:-build/tidy}")
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DUNIEP_UNITY_BUILD=$unity >/dev/null
tools=build/clang-tidy/$version
if [ ! -x "$tools/bin/clang-tidy" ]; then
  tested=${UNIEP_PYTHON_ENVIRONMENT:-build/python}/bin/python
  rm -rf "$tools"
  "${UNIEP_PYTHON:-$([ -x "$tested" ] && echo "$tested" || echo python3)}" -m venv "$tools" &&
    "$tools/bin/pip" install --quiet --disable-pip-version-check "clang-tidy==$version" || {
    rm -rf "$tools"
    echo "clang-tidy: $version can't be installed: no package index, or no Python with venv" >&2
    exit 1
  }
fi
# The program itself, else what starts it, which takes a tenth of a second more.
PATH=$(echo "$PWD/$tools"/lib/python*/site-packages/clang_tidy/data/bin):$PWD/$tools/bin:$PATH
export build clean=$build/clean
export checks=$({ clang-tidy --version; cat .clang-tidy; } | sha256sum)
mkdir -p "$clean"

tidy() {
  local file=$1 command=$2 text key log options=()
  if [[ $file == *.cxx ]]; then # a folder's sources: .clang-tidy would be looked for above the build's folder
    options=("--checks=-bugprone-suspicious-include")
    [[ $file != */unity_tests_* ]] || options=(--config-file=tests/.clang-tidy "${options[@]}")
  fi
  text=$(eval "${command% -o *} -E '$file'" | sha256sum)
  key=$(echo "$checks $command $text" | sha256sum | cut -d' ' -f1)
  [ -e "$clean/$key" ] && return 0
  log=$(mktemp "$clean/log.XXXXXX")
  if clang-tidy -p "$build" --quiet "${options[@]}" "$file" >"$log" 2>/dev/null; then
    rm "$log"
    touch "$clean/$key"
  else
    cat "$log"
    rm "$log"
    return 1
  fi
}
export -f tidy

# One line a file: its name, a tab, and how it is compiled, without the JSON's escapes.
sed -n -e 's/^ *"command": "\(.*\)",\?$/\1/; t command' -e 's/^ *"file": "\(.*\)",\?$/\1/; t file' -e d \
  -e ':command; h; d' -e ':file; G; s/\n/\t/; s/\\\(.\)/\1/g; p' "$build/compile_commands.json" |
  awk -F'\t' -v root="$PWD/" -v build="$build/" '
    index($1, build) == 1 ? $1 ~ /[.]cxx$/ : index($1, root) == 1 && substr($1, length(root) + 1) ~ /^(src|tests|examples)[/].*[.]cpp$/' |
  sort -u -t'	' -k1,1 |
  tr '\t\n' '\0\0' | xargs -0 -n 2 -P "$(nproc)" bash -o pipefail -ec 'tidy "$1" "$2"' tidy
