# kvanta_layer(NAME): the object library kvanta_NAME from every .cc below src/NAME (fuzzers and tests live elsewhere).
# Files named isa_<isa>.cc are compiled with that ISA's flags; files below x86/ only for x86-64, below arm/ for aarch64.
set(KVANTA_LAYERS "" CACHE INTERNAL "")

# fmt's headers. Its implementation is compiled in one file where that file knows the version.
add_library(kvanta_fmt INTERFACE)
get_target_property(fmt_include fmt::fmt-header-only INTERFACE_INCLUDE_DIRECTORIES)
target_include_directories(kvanta_fmt SYSTEM INTERFACE ${fmt_include})
if(fmt_VERSION VERSION_LESS 9.1 OR fmt_VERSION VERSION_GREATER_EQUAL 10)
  target_compile_definitions(kvanta_fmt INTERFACE FMT_HEADER_ONLY=1)
endif()

add_library(kvanta_options INTERFACE)
target_include_directories(kvanta_options INTERFACE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_compile_definitions(kvanta_options INTERFACE KVANTA_VERSION="${PROJECT_VERSION}")
target_link_libraries(kvanta_options INTERFACE kvanta_fmt)
# No contraction: encoders are bit-exact by specification, and kernels use explicit FMAs.
# GCC 12 finds "maybe uninitialized" arrays in loops over runtime bounds, the more the larger a file is; clang's own check,
# in the sanitized builds, does not guess.
target_compile_options(kvanta_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wno-psabi -ffp-contract=off
                                                $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
                                                $<$<BOOL:${KVANTA_WERROR}>:-Werror>)
if(KVANTA_SANITIZE)
  # Leaves out checks that the address sanitizer covers and that take a third of the build time.
  target_compile_options(kvanta_options INTERFACE -fsanitize=${KVANTA_SANITIZE} -fno-omit-frame-pointer
                                                  -fno-sanitize=null,vptr,object-size,pointer-overflow
                                                  $<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=function>
                                                  -fno-sanitize-recover=all)
  target_compile_definitions(kvanta_options INTERFACE KVANTA_SANITIZED)
  target_link_options(kvanta_options INTERFACE -fsanitize=${KVANTA_SANITIZE})
endif()

set(KVANTA_ISA_FLAGS_portable "")
set(KVANTA_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
# GCC 12's own AVX-512 headers start from undefined registers on purpose and then warn about them.
set(KVANTA_AVX512_FLAGS -Wno-uninitialized -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mavx512vnni
                        -mfma -mf16c -mbmi2 -mprefer-vector-width=512)
set(KVANTA_ISA_FLAGS_avx512 ${KVANTA_AVX512_FLAGS} -DKVANTA_PREFETCH_BOTH_LEVELS)
set(KVANTA_ISA_FLAGS_zen4 ${KVANTA_AVX512_FLAGS} -mavx512bf16 -DKVANTA_PREFETCH_LEVEL2)
# The instructions of FP16 and of tiles are inline assembly.
set(KVANTA_ISA_FLAGS_avx512fp16 ${KVANTA_ISA_FLAGS_avx512})
set(KVANTA_ISA_FLAGS_amx ${KVANTA_AVX512_FLAGS} -mavx512bf16 -DKVANTA_PREFETCH_BOTH_LEVELS)

set(KVANTA_ISA_FLAGS_neon "")
set(KVANTA_ISA_FLAGS_dotprod -march=armv8.2-a+dotprod)
set(KVANTA_ISA_FLAGS_i8mm -march=armv8.2-a+dotprod+i8mm+bf16)

set(KVANTA_RUNS_AVX512 FALSE)  # with BF16: all units but avx512fp16 and amx
set(KVANTA_RUNS_AVX512FP16 FALSE)
set(KVANTA_RUNS_AMX FALSE)
set(cpu_flags "")
set(cpu_vendor "")
if(EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo cpu_flags REGEX "^flags" LIMIT_COUNT 1)
  file(STRINGS /proc/cpuinfo cpu_vendor REGEX "^vendor_id" LIMIT_COUNT 1)
  string(APPEND cpu_flags " ")
  if(cpu_flags MATCHES " avx512_bf16 ")
    set(KVANTA_RUNS_AVX512 TRUE)
  endif()
  if(cpu_flags MATCHES " avx512_fp16 ")
    set(KVANTA_RUNS_AVX512FP16 TRUE)
  endif()
  if(cpu_flags MATCHES " amx_int8 ")
    set(KVANTA_RUNS_AMX TRUE)
  endif()
endif()

# KVANTA_UNITS: instruction sets to compile kernels for. "all": those of the architecture, one of which is chosen at run
# time. For a build that stays on the machine, a list: "native", this CPU's best one (src/kernels/cpu/select.cc has the order)
# and what that one is built on; "native;portable" for work on the sources, as scripts/dev builds it.
set(KVANTA_UNITS "all" CACHE STRING "Instruction sets of the CPU kernels: all, native or native;portable")
if(NOT KVANTA_UNITS MATCHES "^(all|native|native;portable)$")
  message(FATAL_ERROR "KVANTA_UNITS=${KVANTA_UNITS}; expected all, native or native;portable")
endif()
set(KVANTA_LEFT_OUT_UNITS "")  # src/kernels/cpu/built_units.h tells the files that list units
if("native" IN_LIST KVANTA_UNITS AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND NOT CMAKE_CROSSCOMPILING)
  set(native avx512)
  foreach(flag avx512f avx512bw avx512vl avx512dq avx512vbmi avx512_vnni)
    if(NOT cpu_flags MATCHES " ${flag} ")
      set(native avx2)
    endif()
  endforeach()
  foreach(flag avx2 fma f16c bmi2)
    if(NOT cpu_flags MATCHES " ${flag} ")
      set(native portable)
    endif()
  endforeach()
  if(native STREQUAL "avx512" AND KVANTA_RUNS_AMX)
    list(APPEND native amx)
  elseif(native STREQUAL "avx512" AND KVANTA_RUNS_AVX512 AND cpu_vendor MATCHES "AuthenticAMD")
    list(APPEND native zen4)
    # Prefetches are the only difference between most kernels of both units, and a matter of the CPU: compiled once.
    list(REMOVE_ITEM KVANTA_ISA_FLAGS_avx512 -DKVANTA_PREFETCH_BOTH_LEVELS)
    list(APPEND KVANTA_ISA_FLAGS_avx512 -DKVANTA_PREFETCH_LEVEL2)
    list(APPEND KVANTA_ISA_FLAGS_zen4 -DKVANTA_SHARES_AVX512)
  elseif(native STREQUAL "avx512" AND KVANTA_RUNS_AVX512FP16)
    list(APPEND native avx512fp16)
  endif()
  set(KVANTA_LEFT_OUT_UNITS amx zen4 avx512fp16 avx512 avx2 portable)
  list(REMOVE_ITEM KVANTA_LEFT_OUT_UNITS ${native} ${KVANTA_UNITS})
  list(JOIN KVANTA_LEFT_OUT_UNITS "\",\"" left_out)
  target_compile_definitions(kvanta_options INTERFACE "KVANTA_LEFT_OUT_UNITS=\"${left_out}\"")
  message(STATUS "Units left out: ${KVANTA_LEFT_OUT_UNITS}")
endif()

# kvanta_isa_sources(VARIABLE): removes other architectures' files from a list of sources, and sets the flags of ISA units.
function(kvanta_isa_sources variable)
  set(others x86 arm)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(others arm)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    set(others x86)
  endif()
  list(JOIN others "|" others)
  set(kept "")
  foreach(source IN LISTS ${variable})
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${source})  # the folder that holds the repository may have such a name
    if(path MATCHES "/(${others})/")
      continue()
    endif()
    list(APPEND kept ${source})
    if(source MATCHES "/isa_([a-z0-9]+)\\.cc$")
      set(isa ${CMAKE_MATCH_1})
      if(isa IN_LIST KVANTA_LEFT_OUT_UNITS)
        list(POP_BACK kept)
        continue()
      endif()
      set(options ${KVANTA_ISA_FLAGS_${isa}} -O3)
      if(isa MATCHES "^(portable|neon|dotprod|i8mm)$")
        list(APPEND options -O2 -ftree-vectorize)  # as fast, and compiled in two thirds of the time
      endif()
      if(KVANTA_SANITIZE)
        list(APPEND options -O1)  # with -O3 these few files alone would take minutes each
        if((isa MATCHES "^(avx512|zen4)$" AND NOT KVANTA_RUNS_AVX512) OR (isa STREQUAL "amx" AND NOT KVANTA_RUNS_AMX)
           OR (isa STREQUAL "avx512fp16" AND NOT KVANTA_RUNS_AVX512FP16))
          list(APPEND options -fno-sanitize=all)  # the unit never runs on this machine
        elseif(KVANTA_SANITIZE MATCHES address AND CMAKE_CXX_COMPILER_ID STREQUAL Clang)
          # Checks as calls: kernels unroll into functions whose inlined checks take as long to compile as the rest.
          list(APPEND options -mllvm -asan-instrumentation-with-call-threshold=0)
        endif()
      endif()
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${options})
      set_property(SOURCE ${source} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
  set(${variable} ${kept} PARENT_SCOPE)
endfunction()

# kvanta_precompile(TARGET): standard headers and those of fmt, precompiled once for all layers. Only native
# builds do this, because objects then depend on the build folder, and ccache cannot share them with other builds.
function(kvanta_precompile target)
  if(KVANTA_UNITS STREQUAL "all" OR KVANTA_SANITIZE)
    return()
  elseif(TARGET kvanta_precompiled)
    target_precompile_headers(${target} REUSE_FROM kvanta_precompiled)
    return()
  endif()
  file(WRITE ${PROJECT_BINARY_DIR}/precompiled.cc "")
  add_library(kvanta_precompiled OBJECT ${PROJECT_BINARY_DIR}/precompiled.cc)
  target_link_libraries(kvanta_precompiled PRIVATE kvanta_options)
  target_precompile_headers(kvanta_precompiled PRIVATE <algorithm> <array> <atomic> <bit> <chrono> <condition_variable>
      <cstdint> <cstring> <deque> <filesystem> <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional>
      <random> <ranges> <set> <span> <string> <string_view> <thread> <unordered_map> <unordered_set> <utility> <variant>
      <vector> <fmt/format.h> <fmt/ranges.h>)
  target_precompile_headers(${target} REUSE_FROM kvanta_precompiled)
endfunction()

function(kvanta_layer name)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${name}/*.cc)
  if(NOT sources)
    return()
  endif()
  kvanta_isa_sources(sources)
  set(units ${sources})
  list(FILTER units INCLUDE REGEX "/isa_[a-z0-9]+\\.cc$")
  list(FILTER sources EXCLUDE REGEX "/isa_[a-z0-9]+\\.cc$")
  foreach(unit IN LISTS units)
    list(PREPEND sources ${unit})  # the longest files first: units, of linear layers before others
  endforeach()
  add_library(kvanta_${name} OBJECT ${sources})
  set_target_properties(kvanta_${name} PROPERTIES UNITY_BUILD ${KVANTA_UNITY} UNITY_BUILD_BATCH_SIZE 16)
  kvanta_precompile(kvanta_${name})
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    if(name MATCHES "^(parallel|cache|attention|store|weights|models|scheduler|observe|engine)$")
      target_compile_options(kvanta_${name} PRIVATE -O1)  # their time goes into the kernels that they call
    elseif(name STREQUAL "formats")
      target_compile_options(kvanta_${name} PRIVATE -O2 -ftree-vectorize)  # -O3 takes a third longer to compile
    endif()
  endif()
  target_link_libraries(kvanta_${name} PUBLIC kvanta_options PRIVATE nlohmann_json::nlohmann_json Threads::Threads)
  set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/base/fmt_instances.cc PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
  set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/base/fmt_instances.cc PROPERTY SKIP_PRECOMPILE_HEADERS ON)
  set(KVANTA_LAYERS ${KVANTA_LAYERS} ${name} CACHE INTERNAL "")
endfunction()
