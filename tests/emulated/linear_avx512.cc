// The linear layers of isa_avx512.cc, likewise.
#include "emulated/names_avx512.h"
// After the names.
#include "kernels/linear/cpu/x86/isa_avx512.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
