# The shared library, what `cmake --install` installs, and the tests of both.
# Included by the top-level CMakeLists.txt after the targets `uniep` (static) and, where it is built, `uniep_command`.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The headers say the version to programs, project() to CMake.
file(STRINGS ${PROJECT_SOURCE_DIR}/include/uniep/version.h UNIEP_VERSION_LINE REGEX "UNIEP_VERSION_STRING")
if(NOT UNIEP_VERSION_LINE MATCHES "\"${PROJECT_VERSION}\"")
  message(FATAL_ERROR "version: project() says ${PROJECT_VERSION}, include/uniep/version.h says ${UNIEP_VERSION_LINE}")
endif()

# A build for other machines holds the C++ run-time library. Exceptions can not pass from one copy of it to another, so
# the shared library then has the C API only.
option(UNIEP_STATIC_RUNTIME "The program and the shared library bring their own C++ run-time library" OFF)
if(UNIEP_STATIC_RUNTIME)
  set(UNIEP_SYMBOLS ${CMAKE_CURRENT_LIST_DIR}/exported_c_symbols.map)
else()
  set(UNIEP_SYMBOLS ${CMAKE_CURRENT_LIST_DIR}/exported_symbols.map)
endif()

# The same objects as the static library's, so that one build gives both. The header is listed because a target needs a
# source.
add_library(uniep_shared SHARED ${PROJECT_SOURCE_DIR}/include/uniep/uniep.h)
set_target_properties(uniep_shared PROPERTIES
  OUTPUT_NAME uniep LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
  LINK_DEPENDS ${UNIEP_SYMBOLS})
target_include_directories(uniep_shared INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(uniep_shared PRIVATE $<LINK_LIBRARY:WHOLE_ARCHIVE,uniep>)
target_link_options(uniep_shared PRIVATE LINKER:--version-script=${UNIEP_SYMBOLS})
if(NOT UNIEP_SANITIZE)
  target_link_options(uniep_shared PRIVATE LINKER:--no-undefined)  # a sanitizer's symbols come from the program
endif()

# The C++ headers need it; C callers do not notice.
target_compile_features(uniep PUBLIC cxx_std_20)
target_compile_features(uniep_shared INTERFACE cxx_std_20)

# What nobody calls goes: of the run-time library, since it may ask for a newer C library; of our own, a sixth of it.
if(UNIEP_STATIC_RUNTIME)
  foreach(target uniep uniep_cuda uniep_comm)
    if(TARGET ${target})
      target_compile_options(${target} PRIVATE -ffunction-sections -fdata-sections)
    endif()
  endforeach()
  foreach(target uniep_shared uniep_command)
    if(TARGET ${target})
      target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc LINKER:--gc-sections)
    endif()
  endforeach()
endif()

set_target_properties(uniep PROPERTIES EXPORT_NAME static)
set_target_properties(uniep_shared PROPERTIES EXPORT_NAME shared)
if(BUILD_SHARED_LIBS)
  add_library(uniep::uniep ALIAS uniep_shared)
else()
  add_library(uniep::uniep ALIAS uniep)
endif()

# A header is installed with the code behind it.
if(NOT TARGET uniep_cuda)
  set(UNIEP_HEADERS_OF_OTHERS PATTERN "grouped_gemm.h" EXCLUDE)
endif()
install(TARGETS uniep uniep_shared EXPORT uniepTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/uniep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" ${UNIEP_HEADERS_OF_OTHERS})
if(TARGET uniep_command)
  install(TARGETS uniep_command)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${CMAKE_CURRENT_LIST_DIR}/third_party_licenses.txt
        DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(UNIEP_CMAKE_FOLDER ${CMAKE_INSTALL_LIBDIR}/cmake/uniep)
install(EXPORT uniepTargets NAMESPACE uniep:: DESTINATION ${UNIEP_CMAKE_FOLDER})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/uniepConfig.cmake.in ${PROJECT_BINARY_DIR}/uniepConfig.cmake
                              INSTALL_DESTINATION ${UNIEP_CMAKE_FOLDER} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may change the C++ API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/uniepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/uniepConfig.cmake ${PROJECT_BINARY_DIR}/uniepConfigVersion.cmake
        DESTINATION ${UNIEP_CMAKE_FOLDER})

# The Python package: pyproject.toml builds uniep_shared and installs this component beside python/uniep. A wheel holds no
# links, so the file has one name.
if(SKBUILD)
  set_target_properties(uniep_shared PROPERTIES VERSION "" SOVERSION "" NO_SONAME ON)
  install(TARGETS uniep_shared LIBRARY DESTINATION uniep COMPONENT python)
endif()

if(UNIEP_BUILD_TESTS AND NOT UNIEP_SANITIZE)
  add_test(NAME exported_symbols
           COMMAND ${PROJECT_SOURCE_DIR}/tests/packaging/exported_symbols.sh $<TARGET_FILE:uniep_shared>
                   $<TARGET_FILE:uniep> ${PROJECT_SOURCE_DIR}/include/uniep)
  add_test(NAME find_package
           COMMAND ${PROJECT_SOURCE_DIR}/tests/packaging/find_package.sh ${CMAKE_COMMAND} ${PROJECT_BINARY_DIR}
                   ${PROJECT_SOURCE_DIR}/examples/find_package)
  set_tests_properties(exported_symbols find_package PROPERTIES LABELS cpu)
  set_tests_properties(find_package PROPERTIES TIMEOUT 600
                       ENVIRONMENT "CC=${CMAKE_C_COMPILER};CXX=${CMAKE_CXX_COMPILER};CMAKE_GENERATOR=${CMAKE_GENERATOR}")
endif()
