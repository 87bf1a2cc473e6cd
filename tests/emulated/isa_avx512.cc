// The AVX-512 unit compiled against SIMDe, under another name.
#define KVANTA_EMULATE_AVX512 1
#include "emulated/avx512.h"

#define Avx512Table EmulatedAvx512Table
#if __has_include("emulated/avx512_codes.h")
#include "kernels/cpu/isa_avx512.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
#else
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/lanes_avx512.h"
// Primitives first.
#include "kernels/cpu/linear_kernels.h"
#include "kernels/cpu/row_kernels.h"
namespace kvanta::kernels {
const IsaTable& Avx512Table() {
  static constexpr IsaTable kTable{.name = "avx512", .linear = kLinearKernels, .rows = kRowKernels};
  return kTable;
}
}  // namespace kvanta::kernels
#endif
