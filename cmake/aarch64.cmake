# Toolchain file: Debian's cross compiler for aarch64 (g++-aarch64-linux-gnu); programs run under qemu-user-static.
# The layers up to attention need header-only dependencies alone: those are the build machine's, whose /usr/include the cross
# compiler searches last. The whole library also links packages of arm64, which are in a sysroot (scripts/cross --wheel).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(KVANTA_SYSROOT "" CACHE PATH "Folder with Debian packages of arm64; empty: the cross compiler's own C library")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KVANTA_SYSROOT)
if(KVANTA_SYSROOT)
  set(CMAKE_SYSROOT ${KVANTA_SYSROOT})
  set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
  set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L ${KVANTA_SYSROOT})
else()
  set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
  set(fmt_DIR /usr/lib/x86_64-linux-gnu/cmake/fmt CACHE PATH "fmt, of which the headers are used")
endif()
