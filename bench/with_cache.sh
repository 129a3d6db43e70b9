#!/bin/bash
# Runs a command with a cache folder of its own. What searches tried and found there comes from FOLDER and goes back to it, compiled
# kernels from and to the folder that UNIEP_CACHE_DIR names else; all of it also where the command is cut.
# Usage: bench/with_cache.sh CACHE FOLDER COMMAND...
set -uo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mkdir -p "$1"
cache=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
shift 2
kernels=${UNIEP_CACHE_DIR-${XDG_CACHE_HOME:-$HOME/.cache}/uniep}
keep() { find "$1" -maxdepth 1 -type f \( -name '*.tried*' -o -name '*.tuned.*' \) -exec cp -p -t "$2" {} +; }
keep_kernels() {
  [ -n "$kernels" ] && (umask 077 && mkdir -p "$kernels") && find "$1" -maxdepth 1 -type f -name '*.cubin' -exec cp -pu -t "$2" {} +
}

trap : INT TERM # the command has it, too: `timeout` sends it to all
keep "$folder" "$cache"
keep_kernels "$kernels" "$cache"
status=0
UNIEP_CACHE_DIR=$cache "$@" || status=$?
keep "$cache" "$folder"
keep_kernels "$cache" "$kernels"
exit "$status"
