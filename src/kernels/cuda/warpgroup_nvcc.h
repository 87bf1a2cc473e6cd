// Products of a warpgroup (wgmma, sm_90a) for nvcc; tests/emulated/cuda_warpgroup.h implements the same for any host
// compiler. Part of the primitives.
#pragma once

#include "kernels/cuda/primitives_nvcc.h"

namespace kvanta::kernels::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVANTA_HAS_WGMMA 1
#endif
#ifdef KVANTA_HAS_WGMMA
inline constexpr bool kHasWarpgroupMma = true;
#else
inline constexpr bool kHasWarpgroupMma = false;  // its functions do nothing
#endif

// Accesses of the registers of products stay on their side of this in the program: before the fence, after the wait.
template <int kCount>
KVANTA_DEVICE void HoldRegisters(float (&d)[kCount][4]) {
  KVANTA_UNROLL
  for (int i = 0; i < 4 * kCount; ++i) asm volatile("" : "+f"(d[i / 4][i % 4]) : : "memory");
}
template <int kCount>
KVANTA_DEVICE void HoldRegisters(Vec4 (&a)[kCount]) {
  KVANTA_UNROLL
  for (int i = 0; i < 4 * kCount; ++i) asm volatile("" : "+r"(a[i / 4].word[i % 4]) : : "memory");
}
// Before the first product, and where other instructions have written its registers.
KVANTA_DEVICE void FenceProducts() {
#ifdef KVANTA_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#endif
}
// Products since the last commit form a group.
KVANTA_DEVICE void CommitProducts() {
#ifdef KVANTA_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
#endif
}
// Waits for all groups.
KVANTA_DEVICE void WaitForProducts() {
#ifdef KVANTA_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
#endif
}
// Makes this thread's stores to shared memory visible to products after the next barrier.
KVANTA_DEVICE void FenceStoresForProducts() {
#ifdef KVANTA_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
#endif
}

// Stores the 8 x 8 values of 16 bits that each word of `words` is, as Transpose8x8's: 16 bytes for each row. Lane l's
// `offset` is that of row l % 8 of word l / 8.
KVANTA_DEVICE void StoreMatrices(int offset, const Vec4& words) {
#ifdef KVANTA_HAS_WGMMA
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(Shared(offset, 16, 16, Access::kWrite)));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(to), "r"(words.word[0]), "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3])
               : "memory");
#endif
}

#define KVANTA_D1(d, i) "+f"((d)[i][0]), "+f"((d)[i][1]), "+f"((d)[i][2]), "+f"((d)[i][3])
#define KVANTA_D4(d, i) KVANTA_D1(d, i), KVANTA_D1(d, (i) + 1), KVANTA_D1(d, (i) + 2), KVANTA_D1(d, (i) + 3)
#define KVANTA_WGMMA(shape, type, names, a0, a1, a2, a3, b, ...)                                                      \
  asm volatile("wgmma.mma_async.sync.aligned." shape "k16.f32." type "." type " {" names "}, {%" a0 ", %" a1 ", %" a2 \
               ", %" a3 "}, %" b ", 1, 1, 1, 0;"                                                                      \
               : __VA_ARGS__                                                                                          \
               : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "l"(descriptor))

// d += a b of 64 x 16 by 16 x 8 kTiles values, asynchronously, by the four warps of a warpgroup: each has 16 rows, as
// PTX fragments of mma.m16n8k16: `a`, and d[i] of columns 8 i to 8 i + 7. The registers belong to the products until
// they have been waited for.
template <bool kBf16, int kTiles>
KVANTA_DEVICE void WarpgroupMma(float (*d)[4], const Vec4& a, const CoreMatrices& b) {
  static_assert(kTiles == 4 || kTiles == 8 || kTiles == 16);
#ifdef KVANTA_HAS_WGMMA
  // In units of 16 bytes, without a swizzle. What is known when this is compiled is one summand.
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(Shared(0, 0, 16, Access::kRead)));
  const uint32_t low = shared / 16 + static_cast<uint32_t>(b.offset / 16 + (b.k_stride / 16 << 16));
  const uint64_t descriptor = uint64_t{static_cast<uint32_t>(b.n_stride / 16)} << 32U | low;
#define KVANTA_NAMES_4 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define KVANTA_NAMES_8 KVANTA_NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KVANTA_NAMES_16                                                                             \
  KVANTA_NAMES_8                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50" \
  ", %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
  if constexpr (kTiles == 4 && kBf16) {
    KVANTA_WGMMA("m64n32", "bf16", KVANTA_NAMES_4, "16", "17", "18", "19", "20", KVANTA_D4(d, 0));
  } else if constexpr (kTiles == 4) {
    KVANTA_WGMMA("m64n32", "f16", KVANTA_NAMES_4, "16", "17", "18", "19", "20", KVANTA_D4(d, 0));
  } else if constexpr (kTiles == 8 && kBf16) {
    KVANTA_WGMMA("m64n64", "bf16", KVANTA_NAMES_8, "32", "33", "34", "35", "36", KVANTA_D4(d, 0), KVANTA_D4(d, 4));
  } else if constexpr (kTiles == 8) {
    KVANTA_WGMMA("m64n64", "f16", KVANTA_NAMES_8, "32", "33", "34", "35", "36", KVANTA_D4(d, 0), KVANTA_D4(d, 4));
  } else if constexpr (kBf16) {
    KVANTA_WGMMA("m64n128", "bf16", KVANTA_NAMES_16, "64", "65", "66", "67", "68", KVANTA_D4(d, 0), KVANTA_D4(d, 4),
                 KVANTA_D4(d, 8), KVANTA_D4(d, 12));
  } else {
    KVANTA_WGMMA("m64n128", "f16", KVANTA_NAMES_16, "64", "65", "66", "67", "68", KVANTA_D4(d, 0), KVANTA_D4(d, 4),
                 KVANTA_D4(d, 8), KVANTA_D4(d, 12));
  }
#endif
}

}  // namespace kvanta::kernels::cuda
