# The CUDA backend: kvanta_cuda(TARGET) adds its objects and the static runtime. AUTO builds it on a machine with a GPU and a
# working nvcc; on one that only has the toolkit it would take a quarter of the time for nothing.
#
# Custom commands instead of CMake's CUDA language, which would test the compiler in every build folder and link its device
# runtime into everything. Machine code for Ampere and Hopper, PTX for later GPUs. Programs start without a driver: the
# static runtime loads it on first use.
set(KVANTA_CUDA "AUTO" CACHE STRING "CUDA backend: AUTO (where a GPU and a usable nvcc are found), ON or OFF")
set(KVANTA_CUDA_TARGETS -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=[sm_90,compute_90]
    CACHE STRING "nvcc's options for the GPUs to compile for; one takes half the time of two")
option(KVANTA_CUDA_FAST_COMPILE "Compile kernels for GPUs in a third of the time: slow kernels, to check that they compile" OFF)

# Sets KVANTA_NVCC, KVANTA_NVCC_VERSION and KVANTA_CUDART, or describes in `missing` what was not found.
function(kvanta_find_cuda missing)
  set(${missing} "" PARENT_SCOPE)
  file(GLOB gpus /dev/nvidia[0-9]* /dev/dxg)
  if(KVANTA_CUDA STREQUAL "AUTO" AND NOT gpus)
    set(${missing} "no GPU; KVANTA_CUDA=ON builds it for other machines" PARENT_SCOPE)
    return()
  endif()
  find_program(KVANTA_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda/bin
               DOC "nvcc of the CUDA toolkit, 12.5 or later")
  if(NOT KVANTA_NVCC)
    set(${missing} "no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${KVANTA_NVCC} --version OUTPUT_VARIABLE version ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" found "${version}")
  if(NOT found OR CMAKE_MATCH_1 VERSION_LESS 12.5)
    set(${missing} "${KVANTA_NVCC} is older than 12.5, or does not run" PARENT_SCOPE)
    return()
  endif()
  set(KVANTA_NVCC_VERSION ${CMAKE_MATCH_1} PARENT_SCOPE)
  execute_process(COMMAND ${KVANTA_NVCC} --dryrun -c none.cu ERROR_VARIABLE plan OUTPUT_QUIET)
  string(REGEX MATCH "#\\$ TOP=([^\n]+)" found "${plan}")  # nvcc may be a link or a script
  set(root ${CMAKE_MATCH_1})
  find_library(KVANTA_CUDART cudart_static HINTS ${root}/lib64 ${root}/targets/x86_64-linux/lib ${root}/lib
               DOC "the CUDA runtime as a static library")
  if(NOT KVANTA_CUDART)
    set(${missing} "no libcudart_static.a in the toolkit of ${KVANTA_NVCC}" PARENT_SCOPE)
    return()
  endif()
  if(NOT DEFINED KVANTA_NVCC_WORKS)
    # nvcc may not support the host compiler.
    file(WRITE ${PROJECT_BINARY_DIR}/cuda/works.cu "#include <cuda_runtime.h>\n__global__ void Empty() {}\n")
    execute_process(COMMAND ${KVANTA_NVCC} -std=c++20 -arch=sm_80 -c works.cu -o works.o
                    WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/cuda RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
      set(works FALSE)
    else()
      set(works TRUE)
    endif()
    set(KVANTA_NVCC_WORKS ${works} CACHE INTERNAL "")
  endif()
  if(NOT KVANTA_NVCC_WORKS)
    set(${missing} "${KVANTA_NVCC} cannot compile C++20 with its host compiler" PARENT_SCOPE)
  endif()
endfunction()

if(NOT KVANTA_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVANTA_CUDA=${KVANTA_CUDA}; expected AUTO, ON or OFF")
endif()
set(KVANTA_HAS_CUDA FALSE)
# Sanitizers do not cover code on a GPU; sanitized builds test the kernels' source by emulation.
if(KVANTA_CUDA STREQUAL "ON" OR (KVANTA_CUDA STREQUAL "AUTO" AND NOT KVANTA_SANITIZE))
  kvanta_find_cuda(missing)
  if(missing STREQUAL "")
    set(KVANTA_HAS_CUDA TRUE)
  elseif(KVANTA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVANTA_CUDA=ON: ${missing}; use AUTO (builds without) or OFF")
  endif()
  message(STATUS "CUDA backend: ${KVANTA_HAS_CUDA} ${missing}")
endif()

# Adds one object per src/kernels/**/*.cu to `target`.
function(kvanta_cuda target)
  if(NOT KVANTA_HAS_CUDA)
    return()
  endif()
  set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/kernels/cuda/cuda_context.cc APPEND PROPERTY COMPILE_DEFINITIONS KVANTA_HAS_CUDA)
  file(GLOB_RECURSE units CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/kernels/*.cu)
  set(warnings -Xcompiler=-Wall,-Wextra,-Wno-psabi)
  if(KVANTA_WERROR)
    list(APPEND warnings -Xcompiler=-Werror --Werror=all-warnings)
  endif()
  foreach(unit IN LISTS units)
    get_filename_component(name ${unit} NAME_WE)
    set(object ${PROJECT_BINARY_DIR}/cuda/${name}.o)
    # Only *_entries.cu contain kernels; the other units only call the runtime and are compiled as C++.
    set(language ${KVANTA_CUDA_TARGETS} --threads 2)
    file(STRINGS ${unit} has_wgmma REGEX "include .*warpgroup_nvcc.h")
    if(has_wgmma)
      # Products of warpgroups are instructions of 9.0 alone: machine code for it, and PTX without them for later GPUs.
      string(REPLACE "compute_90,code=[sm_90,compute_90]" "compute_90a,code=sm_90a;-gencode=arch=compute_90,code=compute_90"
             language "${language}")
      string(REGEX REPLACE "compute_90,code=sm_90(;|$)" "compute_90a,code=sm_90a\\1" language "${language}")
    endif()
    if(KVANTA_CUDA_FAST_COMPILE AND KVANTA_NVCC_VERSION VERSION_GREATER_EQUAL 13)
      list(APPEND language --Ofast-compile=max)
    endif()
    if(NOT name MATCHES "_entries$")
      set(language -x c++)
    endif()
    # No contraction (as in KvantaLayer.cmake): pages are bit-exact, and kernels use explicit FMAs.
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${KVANTA_NVCC} -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr
              ${language} ${warnings} -Xcompiler=-fPIC,-fvisibility=hidden
              -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src -MD -MF ${object}.d -c ${unit} -o ${object}
      DEPENDS ${unit} DEPFILE ${object}.d COMMENT "Building CUDA object ${name}.o" VERBATIM COMMAND_EXPAND_LISTS)
    target_sources(${target} PRIVATE ${object})
    set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  endforeach()
  # An archive cannot contain another: programs link the runtime themselves.
  target_link_libraries(${target} PUBLIC ${KVANTA_CUDART} ${CMAKE_DL_LIBS} rt)
endfunction()
