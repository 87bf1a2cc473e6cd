#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/x86/vec16_avx512.h"
#include "kernels/linear/cpu/x86/blocks_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernel_table.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/linear/cpu/kernels.h"

namespace kvanta::kernels {

const IsaTable& Avx512Table() {
  static constexpr IsaTable kTable{
      .name = "avx512", .linear = kLinearKernels, .rows = kRowKernels, .attention = &kAttentionKernels};
  return kTable;
}

}  // namespace kvanta::kernels
