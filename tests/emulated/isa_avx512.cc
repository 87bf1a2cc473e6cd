// The AVX-512 unit compiled against SIMDe, under another name.
#include "emulated/names_avx512.h"
// After the names.
#include "kernels/cpu/x86/isa_avx512.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
