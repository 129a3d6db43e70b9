# nlohmann/json and {fmt}, headers alone: the system's, else the copies that a source distribution holds
# (cmake/build_backend.py puts them there; the repository has none).
set(UNIEP_THIRD_PARTY ${PROJECT_SOURCE_DIR}/third_party/include)

find_package(nlohmann_json 3.11 QUIET)
if(NOT nlohmann_json_FOUND AND EXISTS ${UNIEP_THIRD_PARTY}/nlohmann/json.hpp)
  message(STATUS "nlohmann/json: the copy in third_party")
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
  target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${UNIEP_THIRD_PARTY})
endif()

find_package(fmt QUIET)
if(NOT fmt_FOUND AND EXISTS ${UNIEP_THIRD_PARTY}/fmt/format.h)
  message(STATUS "fmt: the copy in third_party")
  add_library(fmt::fmt-header-only INTERFACE IMPORTED)
  target_include_directories(fmt::fmt-header-only INTERFACE ${UNIEP_THIRD_PARTY})
  target_compile_definitions(fmt::fmt-header-only INTERFACE FMT_HEADER_ONLY=1)
endif()

foreach(target nlohmann_json::nlohmann_json fmt::fmt-header-only)
  if(NOT TARGET ${target})
    message(FATAL_ERROR "${target} is missing: install nlohmann-json 3.11 and fmt 9 or newer (on Debian: scripts/setup.sh), "
                        "or build from a source distribution of the Python package, which holds copies")
  endif()
endforeach()

# What a target that uses {fmt} links: its headers, and of the version that Debian has not their bodies, which
# src/io/fmt.cpp holds.
add_library(uniep_fmt INTERFACE)
get_target_property(UNIEP_FMT_INCLUDE fmt::fmt-header-only INTERFACE_INCLUDE_DIRECTORIES)
find_file(UNIEP_FMT_CORE fmt/core.h PATHS ${UNIEP_FMT_INCLUDE} NO_DEFAULT_PATH NO_CACHE)
set(UNIEP_FMT_9)
if(UNIEP_FMT_CORE)
  file(STRINGS ${UNIEP_FMT_CORE} UNIEP_FMT_9 REGEX "define FMT_VERSION 9[0-9][0-9][0-9][0-9]$")
endif()
if(UNIEP_FMT_9)
  target_include_directories(uniep_fmt SYSTEM INTERFACE ${UNIEP_FMT_INCLUDE})
else()
  target_link_libraries(uniep_fmt INTERFACE fmt::fmt-header-only)
endif()
