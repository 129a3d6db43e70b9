#!/usr/bin/env bash
# Runs clang-tidy (.clang-tidy says which checks) over src/, tests/ and examples/; any warning fails.
#   scripts/tidy.sh [BUILD_DIR=build/tidy]    which it configures, and nothing is built there
# Each source by itself, so that it has all that it needs. A file that was clean is not looked at again until its preprocessed text, its flags or the checks change.
# clang-tidy comes from the package index, into build/clang-tidy on first use, with UNIEP_PYTHON, the Python tests' Python
# or python3: from version 22 on it leaves system headers out, and takes a third of the time of Debian's.
set -euo pipefail
cd "$(dirname "$0")/.."

version=23.1.4
build=${1:-build/tidy}
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DUNIEP_UNITY_BUILD=OFF >/dev/null
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
  local file=$1 command=$2 text key log
  text=$(eval "${command% -o *} -E '$file'" | sha256sum)
  key=$(echo "$checks $command $text" | sha256sum | cut -d' ' -f1)
  [ -e "$clean/$key" ] && return 0
  log=$(mktemp "$clean/log.XXXXXX")
  if clang-tidy -p "$build" --quiet "$file" >"$log" 2>/dev/null; then
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
  grep -E "^$PWD/(src|tests|examples)/[^	]*\.cpp	" | sort -u -t'	' -k1,1 |
  tr '\t\n' '\0\0' | xargs -0 -n 2 -P "$(nproc)" bash -o pipefail -ec 'tidy "$1" "$2"' tidy
