// Linear layers of the unit for Zen 4: those of the AVX-512 unit, but weights of bf16 are multiplied by vdpbf16ps.
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/kernels.h"
#include "kernels/linear/cpu/weights.h"

namespace kvanta::kernels {

const LinearKernels& Zen4LinearKernels() {
  static const LinearKernels kernels = [] {
    LinearKernels result = Avx512LinearKernels();
    result.bf16 = kWeightKernels<Bf16Weight>;
    return result;
  }();
  return kernels;
}

}  // namespace kvanta::kernels
