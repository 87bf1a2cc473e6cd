// The AVX-512 FP16 unit over fp16 lanes in plain loops, under another name; on CPUs without AVX-512 over SIMDe, too.
#ifdef KVANTA_EMULATED_AVX512
#include "emulated/names_avx512.h"
#else
#include <immintrin.h>
#endif
#define KVANTA_EMULATE_FP16 1
#define Avx512Fp16Table EmulatedAvx512Fp16Table
// After AVX-512.
#include "emulated/fp16x32.h"
// After the names.
#include "kernels/cpu/x86/isa_avx512fp16.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
