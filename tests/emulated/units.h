// Every ISA unit that a test can run here: those of the machine, and AVX-512 emulated where the machine lacks it (and
// where it has it, too: the emulation tests the same source).
#pragma once

#include <string>
#include <vector>

#include "kernels/cpu/select.h"
#include "kernels/ops.h"

namespace kvanta::kernels {

const IsaTable& EmulatedAvx512Table();

}  // namespace kvanta::kernels

namespace kvanta::testing {

struct Unit {
  std::string name;  // a C++ identifier
  const kernels::IsaTable* table;
};

inline std::vector<Unit> Units() {
  std::vector<Unit> units;
  for (const char* isa : kernels::RunnableIsas()) units.push_back({isa, &kernels::SelectIsa(isa)});
#ifdef KVANTA_EMULATED_AVX512
  units.push_back({"avx512_emulated", &kernels::EmulatedAvx512Table()});
#endif
  return units;
}

}  // namespace kvanta::testing
