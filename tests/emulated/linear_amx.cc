// The linear layers of isa_amx.cc, likewise.
#include "emulated/names_amx.h"
// After the names.
#include "kernels/linear/cpu/x86/isa_amx.cc"  // NOLINT(bugprone-suspicious-include): the unit under test
