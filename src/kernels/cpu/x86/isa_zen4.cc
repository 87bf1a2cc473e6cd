// The unit of AMD's CPUs with AVX-512 BF16: the AVX-512 one, but for fp8, whose codes are multiplied by bf16.
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/attention/cpu/x86/fp8_dots_avx512.h"
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernels_of_code.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

const IsaTable& Zen4Table() {
  static const AttentionKernels attention = [] {
    AttentionKernels result = *Avx512Table().attention;
    SetFp8<Fp8DotCode<kE4M3Tables>, Fp8DotCode<kE5M2Tables>>(result);
    result.fp8_has_bf16_operands = true;
    result.two_part_prefetch_bytes = 0;  // the second part would come too late
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
