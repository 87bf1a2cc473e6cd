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
target_compile_options(kvanta_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wno-psabi -ffp-contract=off
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
set(KVANTA_AVX512_FLAGS -Wno-uninitialized $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
                        -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mavx512vnni
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
if(EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo cpu_flags REGEX "^flags.* avx512_bf16" LIMIT_COUNT 1)
  if(cpu_flags)
    set(KVANTA_RUNS_AVX512 TRUE)
  endif()
  if(cpu_flags MATCHES " avx512_fp16")
    set(KVANTA_RUNS_AVX512FP16 TRUE)
  endif()
  if(cpu_flags MATCHES " amx_int8")
    set(KVANTA_RUNS_AMX TRUE)
  endif()
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
    endif()
  endforeach()
  set(${variable} ${kept} PARENT_SCOPE)
endfunction()

function(kvanta_layer name)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${name}/*.cc)
  if(NOT sources)
    return()
  endif()
  kvanta_isa_sources(sources)
  add_library(kvanta_${name} OBJECT ${sources})
  set_target_properties(kvanta_${name} PROPERTIES UNITY_BUILD ${KVANTA_UNITY} UNITY_BUILD_BATCH_SIZE 4)
  target_link_libraries(kvanta_${name} PUBLIC kvanta_options PRIVATE nlohmann_json::nlohmann_json Threads::Threads)
  set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/base/fmt_instances.cc PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
  set(KVANTA_LAYERS ${KVANTA_LAYERS} ${name} CACHE INTERNAL "")
endfunction()
