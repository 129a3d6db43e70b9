#!/bin/bash
# What is made of the results of bench/several_gpus.sh afterwards, on any machine without a GPU.
# Usage: bench/after_several_gpus.sh BUILD FOLDER
#   FOLDER  takes of each NAME.trace NAME.svg; tables.md, as README's; and of the searches of Schedules
#           simulator_DIRECTION.txt, of Schedules that nobody chose simulator_points.txt
# What FOLDER has no results for is passed over. Exit status 1 where something failed.
set -uo pipefail
if [ $# -ne 2 ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
build=$(realpath "$1") folder=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=bench/built.sh
. "$here/built.sh"
uniep=$(built uniep)
shopt -s nullglob
failed=0

for trace in "$folder"/*.trace; do
  "$uniep" trace "$trace" --svg "${trace%.trace}.svg" --workers 1 || failed=1
done
tables=("$folder"/layers_*.jsonl)
if [ ${#tables[@]} -gt 0 ]; then
  python3 "$here/layers_table.py" "${tables[@]}" >"$folder/tables.md" || failed=1
fi
machine=()
[ ! -e "$folder/machine.json" ] || machine=(--machine "$folder/machine.json")
for direction in forward backward; do
  gain=$folder/gain_$direction.jsonl
  [ -e "$gain" ] || continue
  ranks=$(python3 -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["ranks"])' "$gain")
  python3 "$here/simulator_errors.py" "$uniep" "$gain" --direction "$direction" --ranks "$ranks" "${machine[@]}" \
    >"$folder/simulator_$direction.txt" || failed=1
done
if [ -e "$folder/points.jsonl" ]; then
  python3 "$here/simulator_errors.py" "$uniep" "$folder/points.jsonl" "${machine[@]}" >"$folder/simulator_points.txt" || failed=1
fi
exit $failed
