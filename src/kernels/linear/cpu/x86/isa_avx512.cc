// Kernels of quantized weights, in blocks or with scales apart, of all AVX-512 units: a file of their own, since
// they take as long to compile as the rest.
#include "kernels/linear/cpu/x86/blocks_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/block_kernels.h"
#include "kernels/linear/cpu/quantized_kernel.h"

namespace kvanta::kernels {

const BlockKernels& Avx512BlockKernels() noexcept {
  static constexpr BlockKernels kKernels = MakeBlockKernels();
  return kKernels;
}

const QuantizedKernels& Avx512QuantizedKernels() {
  static constexpr QuantizedKernels kKernels = MakeQuantizedKernels();
  return kKernels;
}

}  // namespace kvanta::kernels
