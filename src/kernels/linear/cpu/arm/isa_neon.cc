// Linear layers of the unit of kernels/cpu/arm/isa_neon.cc, a file of their own: they take as long to compile as the
// rest.
#include "kernels/linear/cpu/arm/blocks_neon.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/block_kernels.h"
#include "kernels/linear/cpu/element_kernels.h"
#include "kernels/linear/cpu/group_quant_kernel.h"

namespace kvanta::kernels {

const LinearKernels& NeonLinearKernels() {
  static constexpr BlockKernels kBlocks = MakeBlockKernels();
  static constexpr QuantizedKernels kQuantized = MakeQuantizedKernels();
  static constexpr LinearKernels kKernels = MakeLinearKernels(kBlocks, kQuantized);
  return kKernels;
}

}  // namespace kvanta::kernels
