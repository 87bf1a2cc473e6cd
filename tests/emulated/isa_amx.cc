// The AMX unit over emulated tiles, under another name; on CPUs without AVX-512 over SIMDe, too.
#ifdef KVANTA_EMULATED_AVX512
#define KVANTA_EMULATE_AVX512 1
#include "emulated/avx512.h"
#define Avx512Table EmulatedAvx512Table
#define Avx512BlockKernels EmulatedAvx512BlockKernels
#define Avx512QuantizedKernels EmulatedAvx512QuantizedKernels
#endif
#define KVANTA_EMULATE_AMX 1
#include "emulated/tiles.h"

#define AmxTable EmulatedAmxTable
#define AmxBlockKernels EmulatedAmxBlockKernels
#define AmxQuantizedKernels EmulatedAmxQuantizedKernels
#include "kernels/cpu/x86/isa_amx.cc"         // NOLINT(bugprone-suspicious-include): the unit under test
#include "kernels/linear/cpu/x86/isa_amx.cc"  // NOLINT(bugprone-suspicious-include): its other part
