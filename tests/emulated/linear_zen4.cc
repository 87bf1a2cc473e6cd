// The linear layers of isa_zen4.cc, likewise.
#define KVANTA_EMULATE_AVX512_BF16 1
#include "emulated/names_avx512.h"
// After the names.
#include "kernels/linear/cpu/x86/isa_zen4.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
