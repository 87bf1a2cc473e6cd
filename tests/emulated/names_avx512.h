// Other names for the AVX-512 unit's tables, compiled against SIMDe.
#pragma once

#define KVANTA_EMULATE_AVX512 1
#include "emulated/avx512.h"

#define Avx512Table EmulatedAvx512Table
#define Zen4Table EmulatedZen4Table
#define Avx512LinearKernels EmulatedAvx512LinearKernels
#define Zen4LinearKernels EmulatedZen4LinearKernels
