// Linear layers of the unit for Zen 4: those of the AVX-512 unit, but weights of bf16 are multiplied by vdpbf16ps, and
// codes of E4M3 are decoded by byte tables where rows are few.
#include "kernels/cpu/x86/vec16_avx512.h"
// Primitives first, then the kernels written over them.
#include "kernels/cpu/isa_table.h"
#include "kernels/linear/cpu/group_quant_kernel.h"
#include "kernels/linear/cpu/kernels.h"
#include "kernels/linear/cpu/weights.h"
#include "kernels/linear/cpu/x86/e4m3_tables.h"

namespace kvanta::kernels {
namespace {

template <int kFormat = 0>
void SetE4m3Kernels(QuantizedKernels& kernels) {
  if constexpr (kFormat < weights::kKernelFormatCount) {
    constexpr weights::KernelFormat kCodes = weights::kKernelFormats[kFormat];
    if constexpr (kCodes.codes == weights::CodeType::kE4M3) {
      using Layout = QuantizedLayout<TableE4m3Codes, ScalesOfType<kCodes.scales>, kCodes.group>;
      kernels.of[kFormat] = kWeightKernels<QuantizedStep<Layout>>;
    }
    SetE4m3Kernels<kFormat + 1>(kernels);
  }
}

}  // namespace

const LinearKernels& Zen4LinearKernels() {
  static const QuantizedKernels quantized = [] {
    QuantizedKernels result = *Avx512LinearKernels().quantized;
    SetE4m3Kernels(result);
    return result;
  }();
  static const LinearKernels kernels = [] {
    LinearKernels result = Avx512LinearKernels();
    result.bf16 = kWeightKernels<Bf16Weight>;
    result.quantized = &quantized;
    return result;
  }();
  return kernels;
}

}  // namespace kvanta::kernels
