// KVANTA_INLINE marks functions that must be inlined. An ISA unit may emit nothing with external linkage: the linker
// would be free to keep the copy that another CPU cannot run.
#pragma once

#define KVANTA_INLINE inline __attribute__((always_inline))

namespace kvanta::kernels {
namespace {

// Smaller register and query tiles, for builds where compile time matters more than speed.
#if defined(KVANTA_SANITIZED) || defined(KVANTA_EMULATE_AVX512)
inline constexpr bool kSmallTiles = true;
#else
inline constexpr bool kSmallTiles = false;
#endif

}  // namespace
}  // namespace kvanta::kernels
