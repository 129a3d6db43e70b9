#!/bin/sh
# Makes build/portable/uniep-VERSION-linux-MACHINE: one folder with the program, the libraries, the headers and the texts
# that runs on any Linux of this machine's kind with the C library named in its README. Checks it before it says so.
set -eu
cd "$(dirname "$0")/.."

limit_mib=40
newest_glibc=2.36 # of Debian 12
mkdir -p build/portable
version=$(sed -n 's/.*UNIEP_VERSION_STRING "\(.*\)"/\1/p' include/uniep/version.h)
build=build/portable/build
out=build/portable/uniep-$version-linux-$(uname -m)
fail() {
  echo "portable: $1" >&2
  exit 1
}

cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_LIBDIR=lib \
  -DUNIEP_STATIC_RUNTIME=ON -DUNIEP_BUILD_TESTS=OFF -DUNIEP_BUILD_BENCH=OFF -DUNIEP_BUILD_EXAMPLES=OFF \
  > "$build.log" || fail "see $build.log"
cmake --build "$build"
rm -rf "$out"
cmake --install "$build" --prefix "$out" --strip > "$build.log"
cp LICENSE "$out/LICENSE"

# Nothing but the C library is needed, and no newer one than promised.
oldest_glibc=0
for file in "$out/bin/uniep" "$out/lib/libuniep.so"; do
  others=$(readelf -d "$file" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' |
    grep -vE '^(libc|libm|libpthread|libdl)\.so\.[0-9]+$|^ld-linux' || true)
  [ -z "$others" ] || fail "$file needs $others"
  ! readelf -d "$file" | grep -E 'RPATH|RUNPATH' || fail "$file looks for libraries in a folder of the build"
  needed=$(objdump -T "$file" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -1)
  oldest_glibc=$(printf '%s\n' "$oldest_glibc" "$needed" | sort -V | tail -1)
done
[ "$(printf '%s\n' "$oldest_glibc" "$newest_glibc" | sort -V | tail -1)" = "$newest_glibc" ] ||
  fail "glibc $oldest_glibc is needed; at most $newest_glibc is promised"
sed "s/@VERSION@/$version/; s/@GLIBC@/$oldest_glibc/" scripts/portable_readme.txt > "$out/README"

mib=$(du -sm "$out" | cut -f1)
[ "$mib" -lt "$limit_mib" ] || fail "$out has $mib MiB; the limit is $limit_mib"
tests/packaging/exported_symbols.sh "$out/lib/libuniep.so" "$out/lib/libuniep.a" "$out/include/uniep"
CMAKE_GENERATOR=Ninja tests/packaging/find_package.sh cmake "$PWD/$build" examples/find_package c_only > "$build.log" ||
  fail "see $build.log"

# From a copy elsewhere, with nothing in the environment.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -R "$out" "$copy/uniep"
(cd "$copy" && env -i uniep/bin/uniep run --ranks 4 --tokens 64,0,37,128 --hidden 128 --intermediate 64 --experts 16 \
  --topk 4 --backward --check --schedule auto > run.log) || fail "the program fails when copied"

echo "$out: $mib MiB, needs glibc $oldest_glibc or newer and nothing else"
