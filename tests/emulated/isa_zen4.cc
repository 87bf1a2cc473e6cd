// The unit of Zen 4, likewise.
#define KVANTA_EMULATE_AVX512_BF16 1
#include "emulated/names_avx512.h"
// After the names.
#include "kernels/cpu/x86/isa_zen4.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
