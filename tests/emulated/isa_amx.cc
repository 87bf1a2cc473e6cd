// The AMX unit over emulated tiles, under another name; on CPUs without AVX-512 over SIMDe, too.
#include "emulated/names_amx.h"
// After the names.
#include "kernels/cpu/x86/isa_amx.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
