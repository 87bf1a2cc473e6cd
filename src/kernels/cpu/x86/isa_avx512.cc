// The unit of CPUs with AVX-512 BF16: that of CPUs with VNNI alone, but for the products of bf16 weights.
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/kernels.h"
#include "kernels/linear/cpu/weights.h"

namespace kvanta::kernels {

const IsaTable& Avx512Table() {
  static const IsaTable table = [] {
    IsaTable result = Avx512VnniTable();
    result.name = "avx512";
    result.linear.bf16 = kWeightKernels<Bf16Weight>;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
