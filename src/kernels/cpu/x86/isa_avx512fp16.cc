// The unit of CPUs with AVX-512 FP16, where AMX is missing or hidden by a hypervisor: the AVX-512 one, but codes of fp8
// in the cache are multiplied by operands of fp16.
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/attention/cpu/x86/fp16_dots_avx512.h"
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernels_of_code.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

const IsaTable& Avx512Fp16Table() {
  static const AttentionKernels attention = [] {
    AttentionKernels result = *Avx512Table().attention;
    SetFp8<Fp16DotE4M3, Fp16DotE5M2>(result);
    result.fp8_operands = DType::kF16;
    return result;
  }();
  static const IsaTable table = [] {
    IsaTable result = Avx512Table();
    result.name = "avx512fp16";
    result.attention = &attention;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
