#!/bin/sh
# find_package.sh CMAKE BUILD_FOLDER PROJECT [c_only]
# Installs the build, moves it elsewhere, and builds and runs a project that finds it there, with either library.
# c_only: the shared library has the C API only.
set -eu
cmake=$1
build=$2
project=$3
shared_programs="from_cpp from_c"
[ $# -lt 4 ] || shared_programs=from_c
folder=$(mktemp -d "$build/find_package.XXXXXX")
trap 'rm -rf "$folder"' EXIT
fail() {
  echo "$1" >&2
  exit 1
}

"$cmake" --install "$build" --prefix "$folder/first" > "$folder/install.log"
mv "$folder/first" "$folder/installed"
package=$(dirname "$(find "$folder/installed" -name uniepConfig.cmake)")
! grep -ErnI 'nlohmann|fmt|CLI11' "$package" || fail "the package names a private library"
! grep -rnF "$folder" "$package" || fail "the package names the folder that it was installed to"

for shared in ON OFF; do
  programs="from_cpp from_c"
  [ $shared = OFF ] || programs=$shared_programs
  own=$folder/shared_$shared
  "$cmake" -S "$project" -B "$own" -Duniep_ROOT="$folder/installed" -DBUILD_SHARED_LIBS=$shared \
    -DCMAKE_BUILD_TYPE=Debug > "$own.log" || { cat "$own.log" >&2; fail "configuring failed"; }
  "$cmake" --build "$own" --target $programs > "$own.log" 2>&1 || { cat "$own.log" >&2; fail "building failed"; }
  for program in $programs; do
    "$own/$program"
    if readelf -d "$own/$program" | grep -q 'NEEDED.*\[libuniep\.so\.'; then linked=ON; else linked=OFF; fi
    [ $linked = $shared ] || fail "$program: BUILD_SHARED_LIBS=$shared, but linked to the shared library: $linked"
  done
done

# A project without C++ may use the shared library, and is told so where it asks for the static one.
mkdir "$folder/only_c"
cp "$project/main.c" "$folder/only_c"
cat > "$folder/only_c/CMakeLists.txt" <<'TEXT'
cmake_minimum_required(VERSION 3.25)
project(only_c LANGUAGES C)
find_package(uniep 0.1 REQUIRED)
add_executable(from_c main.c)
target_link_libraries(from_c PRIVATE uniep::uniep)
TEXT
"$cmake" -S "$folder/only_c" -B "$folder/c" -Duniep_ROOT="$folder/installed" -DBUILD_SHARED_LIBS=ON > "$folder/c.log"
"$cmake" --build "$folder/c" >> "$folder/c.log" 2>&1 || { cat "$folder/c.log" >&2; fail "building without C++ failed"; }
"$folder/c/from_c"
! "$cmake" -S "$folder/only_c" -B "$folder/c" -DBUILD_SHARED_LIBS=OFF > "$folder/c.log" 2>&1 ||
  fail "a project without C++ was given the static library"
grep -q 'enable the language CXX' "$folder/c.log" || { cat "$folder/c.log" >&2; fail "the reason is not told"; }
