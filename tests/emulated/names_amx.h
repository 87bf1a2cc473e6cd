// Other names for the AMX unit's tables, over emulated tiles; on CPUs without AVX-512 over SIMDe, too.
#pragma once

#ifdef KVANTA_EMULATED_AVX512
#define KVANTA_EMULATE_AVX512_BF16 1
#include "emulated/names_avx512.h"
#endif
#define KVANTA_EMULATE_AMX 1
#include "emulated/tiles.h"

#define AmxTable EmulatedAmxTable
#define AmxLinearKernels EmulatedAmxLinearKernels
