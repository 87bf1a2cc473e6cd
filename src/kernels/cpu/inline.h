// KVANTA_INLINE: for what must disappear into its caller. In ISA units nothing may be emitted with external linkage: a
// linker would be free to keep the copy that another CPU cannot run.
#pragma once

#define KVANTA_INLINE inline __attribute__((always_inline))

namespace kvanta::kernels {
namespace {

// Kernels for fewer rows at once, where what counts is how long they take to compile.
#if defined(KVANTA_SANITIZED) || defined(KVANTA_EMULATE_AVX512)
inline constexpr bool kSmallTiles = true;
#else
inline constexpr bool kSmallTiles = false;
#endif

}  // namespace
}  // namespace kvanta::kernels
