#!/bin/sh
# exported_symbols.sh LIBUNIEP.SO LIBUNIEP.A HEADERS
# The shared library exports the public API and nothing else, and no code for newer processors runs by accident.
set -eu
shared=$1
archive=$2
headers=$3
failed=0
complain() {
  echo "$1:" >&2
  echo "$2" | head -20 >&2
  failed=1
}

exported=$(nm -D --defined-only "$shared" | awk '{print $3}')
demangled=$(echo "$exported" | c++filt)
[ -n "$exported" ]

private=$(echo "$demangled" |
  grep -vE '^(uniep_[a-z0-9_]+$|uniep::|(typeinfo|typeinfo name|vtable) for uniep::)' || true)
[ -z "$private" ] || complain "exported, and not of uniep" "$private"

# Every exported name is written in a public header.
for name in $(echo "$demangled" | sed -n 's/^\(.* for \)\{0,1\}uniep::\([^(]*\).*/\2/p' | sed 's/.*:://; s/\[.*//; s/^~//' |
              sort -u); do
  grep -qwF "$name" "$headers"/*.h || complain "exported, and in no public header" "$name"
done

# The C API is exported as it is declared.
declared=$(grep -ohE '\buniep_[a-z0-9_]+\(' "$headers"/c_*.h | tr -d '(' | sort -u)
defined=$(echo "$exported" | grep '^uniep_' | sort -u)
[ "$declared" = "$defined" ] || complain "declared in c_*.h or exported, but not both" \
  "$(printf '%s\n%s\n' "$declared" "$defined" | sort | uniq -u)"

# An inline function of a file built for AVX may be the copy that the linker keeps for all.
shareable=$(nm -A -C --defined-only "$archive" 2>/dev/null | grep -E '_avx[0-9]+\.cpp\.o:.* [WVu] ' || true)
[ -z "$shareable" ] || complain "shareable functions built for newer processors" "$shareable"

[ $failed -eq 0 ]
echo "$(echo "$exported" | wc -l) exported symbols, all of the public API"
