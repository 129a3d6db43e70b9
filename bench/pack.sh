#!/bin/bash
# Packs the results of bench/several_gpus.sh into few small files, to bring them from one machine to another, and unpacks them there,
# where a run then goes on.
# Usage: bench/pack.sh FOLDER OUT
#        bench/pack.sh --unpack OUT FOLDER
#   OUT  takes results.tar.xz, all but timelines and compiled kernels, and of each timeline NAME.trace.xz; .gz where there is no xz
# Exit status 1, behind packing all, where there are more than 8 files, or one is larger than 16 MiB.
set -euo pipefail
shopt -s nullglob
if [ $# -lt 2 ] || { [ "$1" = --unpack ] && [ $# -ne 3 ]; }; then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
if [ "$1" = --unpack ]; then
  mkdir -p "$3"
  tar -xf "$2"/results.tar.* -C "$3"
  for trace in "$2"/*.trace.*; do
    name=$(basename "${trace%.*}")
    case $trace in
      *.xz) xz -dc "$trace" >"$3/$name" ;;
      *.gz) gzip -dc "$trace" >"$3/$name" ;;
    esac
  done
  exit 0
fi
compress=(xz -T0 -c) end=xz
command -v xz >/dev/null || compress=(gzip -c) end=gz
mkdir -p "$2"
tar -C "$1" --exclude='*.trace' --exclude='*.cubin' -c . | "${compress[@]}" >"$2/results.tar.$end"
for trace in "$1"/*.trace; do "${compress[@]}" "$trace" >"$2/$(basename "$trace").$end"; done
ls -l "$2"
large=$(find "$2" -type f -size +16M -printf '%f ')
files=$(find "$2" -type f | wc -l)
[ -z "$large" ] || echo "larger than 16 MiB: $large" >&2
[ "$files" -le 8 ] || echo "$files files; more than 8" >&2
[ -z "$large" ] && [ "$files" -le 8 ]
