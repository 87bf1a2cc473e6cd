#include "kernels/attention/cpu/codes_avx512.h"
#include "kernels/cpu/vec16_avx512.h"
#include "kernels/linear/cpu/blocks_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernel_table.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/roofline_kernels.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/linear/cpu/kernels.h"

namespace kvanta::kernels {

const IsaTable& Avx512Table() {
  static constexpr IsaTable kTable{.name = "avx512",
                                   .linear = kLinearKernels,
                                   .rows = kRowKernels,
                                   .limits = kLimitKernels,
                                   .attention = &kAttentionKernels};
  return kTable;
}

}  // namespace kvanta::kernels
