#include "kernels/attention/cpu/klt_portable.h"
#include "kernels/attention/cpu/x86/codes_avx2.h"
#include "kernels/attention/cpu/x86/trellis_avx2.h"
#include "kernels/cpu/x86/vec16_avx2.h"
// Primitives first, then the kernels written over them.
#include "kernels/attention/cpu/kernel_table.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/linear_attention/cpu/causal_conv_kernels.h"
#include "kernels/linear_attention/cpu/delta_kernels.h"
#include "kernels/linear_attention/cpu/mamba2_kernels.h"

namespace kvanta::kernels {

const IsaTable& Avx2Table() {
  static const IsaTable kTable{.name = "avx2",
                               .linear = Avx2LinearKernels(),
                               .rows = kRowKernels,
                               .causal_conv = kCausalConvKernels,
                               .gated_delta = kGatedDeltaKernels,
                               .mamba2 = kMamba2Kernels,
                               .attention = &kAttentionKernels};
  return kTable;
}

}  // namespace kvanta::kernels
