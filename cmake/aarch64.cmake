# Toolchain file: Debian's cross compiler for aarch64 (g++-aarch64-linux-gnu); programs run under qemu-user-static.
# Header-only dependencies are the build machine's, whose /usr/include the cross compiler searches last.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
set(fmt_DIR /usr/lib/x86_64-linux-gnu/cmake/fmt CACHE PATH "fmt, of which the headers are used")
