// ISA units that a test can run: the machine's, and emulated AVX-512 and AMX on machines without them.
#pragma once

#include <string>
#include <vector>

#include "kernels/cpu/select.h"
#include "kernels/ops.h"

namespace kvanta::kernels {

const IsaTable& EmulatedAvx512Table();
const IsaTable& EmulatedAmxTable();

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
#ifdef KVANTA_EMULATED_AMX
  units.push_back({"amx_emulated", &kernels::EmulatedAmxTable()});
#endif
  return units;
}

}  // namespace kvanta::testing
