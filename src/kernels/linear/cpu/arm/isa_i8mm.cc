// Kernels of quantized weights, in blocks or with scales apart, of the unit of kernels/cpu/arm/isa_i8mm.cc: a file of
// their own, since they take as long to compile as the rest.
#include "kernels/linear/cpu/arm/blocks_neon.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/block_kernels.h"
#include "kernels/linear/cpu/quantized_kernel.h"

namespace kvanta::kernels {

const BlockKernels& I8mmBlockKernels() {
  static constexpr BlockKernels kKernels = MakeBlockKernels();
  return kKernels;
}

const QuantizedKernels& I8mmQuantizedKernels() {
  static constexpr QuantizedKernels kKernels = MakeQuantizedKernels();
  return kKernels;
}

}  // namespace kvanta::kernels
