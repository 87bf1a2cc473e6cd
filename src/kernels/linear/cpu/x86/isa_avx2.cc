// Linear layers of the unit of kernels/cpu/x86/isa_avx2.cc, a file of their own: they take as long to compile as the
// rest.
#include "kernels/linear/cpu/x86/blocks_avx2.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/block_kernels.h"
#include "kernels/linear/cpu/element_kernels.h"
#include "kernels/linear/cpu/group_quant_kernel.h"

namespace kvanta::kernels {

const LinearKernels& Avx2LinearKernels() {
  static constexpr BlockKernels kBlocks = MakeBlockKernels();
  static constexpr QuantizedKernels kQuantized = MakeQuantizedKernels();
  static constexpr LinearKernels kKernels = MakeLinearKernels(kBlocks, kQuantized);
  return kKernels;
}

}  // namespace kvanta::kernels
