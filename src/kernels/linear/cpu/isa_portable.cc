// Kernels of quantized weights, in blocks or with scales apart, of the unit of kernels/cpu/isa_portable.cc: a file of
// their own, since they take as long to compile as the rest.
#include "kernels/linear/cpu/blocks_portable.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/block_kernels.h"
#include "kernels/linear/cpu/quantized_kernel.h"

namespace kvanta::kernels {

const BlockKernels& PortableBlockKernels() {
  static constexpr BlockKernels kKernels = MakeBlockKernels();
  return kKernels;
}

const QuantizedKernels& PortableQuantizedKernels() {
  static constexpr QuantizedKernels kKernels = MakeQuantizedKernels();
  return kKernels;
}

}  // namespace kvanta::kernels
