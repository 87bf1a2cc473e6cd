// The unit of CPUs with AVX-512 BF16: that of CPUs with VNNI alone, but for the products of bf16 weights and, where
// they are fast, of fp8 codes.
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/attention/cpu/x86/fp8_dots_avx512.h"
#include "kernels/cpu/x86/cpu_features.h"
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernels_of_code.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/kernels.h"
#include "kernels/linear/cpu/weights.h"

namespace kvanta::kernels {

const IsaTable& Avx512Table() {
  static const IsaTable table = [] {
    IsaTable result = DetectCpuFeatures().fast_bf16_dots ? Avx512Fp8DotsTable() : Avx512VnniTable();
    result.name = "avx512";
    result.linear.bf16 = kWeightKernels<Bf16Weight>;
    return result;
  }();
  return table;
}

const IsaTable& Avx512Fp8DotsTable() {
  static const AttentionKernels attention = [] {
    AttentionKernels result = *Avx512VnniTable().attention;
    SetFp8<Fp8DotCode<kE4M3Tables>, Fp8DotCode<kE5M2Tables>>(result);
    result.fp8_has_bf16_operands = true;
    return result;
  }();
  static const IsaTable table = [] {
    IsaTable result = Avx512VnniTable();
    result.attention = &attention;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
