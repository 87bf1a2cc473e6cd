// The unit of AMD's CPUs with AVX-512 BF16. It differs from the AVX-512 one in two ways:
//   * Codes of bf16 and fp8 are multiplied by operands rounded to bf16.
//   * Pages are prefetched into the second-level cache (KVANTA_PREFETCH_LEVEL2). A prefetch into the first one holds
//     one of its few miss buffers for as long as memory takes, and reads that only miss the first-level cache wait.
// A sanitized build shares the kernels of the AVX-512 unit that differ in the prefetch alone: they compile slowly.
#include "kernels/attention/cpu/x86/bf16_dots_avx512.h"
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/x86/vec16_avx512.h"
#ifndef KVANTA_SANITIZED
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
#ifdef KVANTA_SANITIZED
    AttentionKernels result = *Avx512Table().attention;
#else
    AttentionKernels result = kAttentionKernels;
#endif
    Set<Bf16DotBf16>(result, formats::ElementType::kBf16);
    SetFp8<Bf16DotE4M3, Bf16DotE5M2>(result);
    result.bf16_operands = true;
    result.pass_rows = 16;
    result.two_part_prefetch_bytes = 12 << 10;  // 4-bit pages gain by it, 8-bit ones lose
    return result;
  }();
  static const IsaTable table = [] {
    IsaTable result = Avx512Table();
    result.name = "zen4";
    result.attention = &attention;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
