// The unit of CPUs whose vdpbf16ps is as fast as a multiply-add: AMD's. It differs from the AVX-512 one in three ways:
//   * Weights of bf16 are multiplied by vdpbf16ps.
//   * Codes of bf16 and fp8 in the cache are, too, by operands rounded to bf16.
//   * Pages are prefetched two ahead, into the second-level cache alone (KVANTA_PREFETCH_LEVEL2). A prefetch into the
//     first one holds one of its few miss buffers for as long as memory takes, and reads that only miss the first-level
//     cache wait.
// Sanitized and emulated builds share the kernels of the AVX-512 unit that differ in the prefetch alone: they compile
// slowly. So do native builds, where the AVX-512 unit has the prefetches of this one (cmake/KvantaLayer.cmake).
#if defined(KVANTA_SANITIZED) || defined(KVANTA_EMULATE_AVX512)
#define KVANTA_SHARES_AVX512 1
#endif
#include "kernels/attention/cpu/x86/bf16_dots_avx512.h"
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/x86/vec16_avx512.h"
#ifndef KVANTA_SHARES_AVX512
#include "kernels/attention/cpu/x86/klt_avx512.h"
#include "kernels/attention/cpu/x86/trellis_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernel_table.h"
#else
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernels_of_code.h"
#endif
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

const IsaTable& Zen4Table() {
  static const AttentionKernels attention = [] {
#ifdef KVANTA_SHARES_AVX512
    AttentionKernels result = *Avx512Table().attention;
#else
    AttentionKernels result = kAttentionKernels;
#endif
    Set<Bf16DotBf16>(result, formats::ElementType::kBf16);
    SetFp8<Bf16DotE4M3, Bf16DotE5M2>(result);
    result.bf16_operands = result.fp8_operands = DType::kBf16;
    return result;
  }();
  static const IsaTable table = [] {
    IsaTable result = Avx512Table();
    result.name = "zen4";
    result.linear = Zen4LinearKernels();
    result.attention = &attention;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
