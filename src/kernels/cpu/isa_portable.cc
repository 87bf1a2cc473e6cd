#include "kernels/cpu/codes_portable.h"
#include "kernels/cpu/linear_blocks_portable.h"
#include "kernels/cpu/vec16_portable.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/attention_kernel_table.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/linear_kernels.h"
#include "kernels/cpu/roofline_kernels.h"
#include "kernels/cpu/row_kernels.h"

namespace kvanta::kernels {

const IsaTable& PortableTable() {
  static constexpr IsaTable kTable{.name = "portable",
                                   .linear = kLinearKernels,
                                   .rows = kRowKernels,
                                   .limits = kLimitKernels,
                                   .attention = &kAttentionKernels};
  return kTable;
}

}  // namespace kvanta::kernels
