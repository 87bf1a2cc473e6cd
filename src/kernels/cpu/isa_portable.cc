#include "kernels/attention/cpu/codes_portable.h"
#include "kernels/attention/cpu/klt_portable.h"
#include "kernels/attention/cpu/trellis_portable.h"
#include "kernels/cpu/vec16_portable.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernel_table.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/linear_attention/cpu/causal_conv_kernels.h"
#include "kernels/linear_attention/cpu/delta_kernels.h"
#include "kernels/linear_attention/cpu/mamba2_kernels.h"

namespace kvanta::kernels {

const IsaTable& PortableTable() {
  static const IsaTable kTable{.name = "portable",
                               .linear = PortableLinearKernels(),
                               .rows = kRowKernels,
                               .causal_conv = kCausalConvKernels,
                               .gated_delta = kGatedDeltaKernels,
                               .mamba2 = kMamba2Kernels,
                               .attention = &kAttentionKernels};
  return kTable;
}

}  // namespace kvanta::kernels
