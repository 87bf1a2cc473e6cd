// The AVX-512 unit compiled against SIMDe, under another name.
#define KVANTA_EMULATE_AVX512 1
#include "emulated/avx512.h"

#define Avx512Table EmulatedAvx512Table
#define Avx512BlockKernels EmulatedAvx512BlockKernels
#define Avx512QuantizedKernels EmulatedAvx512QuantizedKernels
#include "kernels/cpu/x86/isa_avx512.cc"         // NOLINT(bugprone-suspicious-include): the unit under test
#include "kernels/linear/cpu/x86/isa_avx512.cc"  // NOLINT(bugprone-suspicious-include): its other part
