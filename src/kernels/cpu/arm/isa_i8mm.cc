#include "kernels/attention/cpu/arm/codes_neon.h"
#include "kernels/attention/cpu/klt_portable.h"
#include "kernels/attention/cpu/trellis_portable.h"
#include "kernels/cpu/arm/vec16_neon.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernel_table.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/linear_attention/cpu/causal_conv_kernels.h"
#include "kernels/linear_attention/cpu/delta_kernels.h"
#include "kernels/linear_attention/cpu/mamba2_kernels.h"

namespace kvanta::kernels {

const IsaTable& I8mmTable() {
  static const IsaTable kTable{.name = "i8mm",
                               .linear = I8mmLinearKernels(),
                               .rows = kRowKernels,
                               .causal_conv = kCausalConvKernels,
                               .gated_delta = kGatedDeltaKernels,
                               .mamba2 = kMamba2Kernels,
                               .attention = &kAttentionKernels};
  return kTable;
}

}  // namespace kvanta::kernels
