# The sources of a folder are compiled as one (CMake's unity builds), in a third of the time: each header is read once,
# and each template instantiated once. So two files of a folder can't give one name to two things, not even in anonymous
# namespaces. Sources with options of their own stay apart.
option(UNIEP_UNITY_BUILD "Compile the sources of a folder as one" ON)

# To be called in the folder that makes the target, once it has all its sources.
function(uniep_compile_by_folder target)
  if(NOT UNIEP_UNITY_BUILD)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source NORMALIZE OUTPUT_VARIABLE path)
    cmake_path(IS_PREFIX PROJECT_BINARY_DIR "${path}" NORMALIZE is_generated)
    if(path MATCHES "\\.cpp$" AND NOT is_generated)
      cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
      cmake_path(GET path PARENT_PATH folder)
      string(MAKE_C_IDENTIFIER "${folder}" group)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
    endif()
  endforeach()
  # A class that is not in a header may hold what is in an anonymous namespace, which the compiler can't tell here.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()
