// ISA units that a test can run: the machine's, and emulated AVX-512 and AMX on machines without them.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cpu/select.h"
#include "kernels/ops.h"

namespace kvanta::kernels {

const IsaTable& EmulatedAvx512Table();
const IsaTable& EmulatedZen4Table();
const IsaTable& EmulatedAvx512Fp16Table();
const IsaTable& EmulatedAmxTable();

}  // namespace kvanta::kernels

namespace kvanta::testing {

struct Unit {
  std::string name;  // a C++ identifier
  const kernels::IsaTable* table;
};

// Units of this machine and emulated ones, the best first; for the thread sanitizer, the best one: the others differ
// from it in arithmetic alone.
inline std::vector<Unit> AllUnits() {
  std::vector<Unit> units;
  for (const char* isa : kernels::RunnableIsas()) units.push_back({isa, &kernels::SelectIsa(isa)});
#ifdef KVANTA_EMULATED_AVX512
  units.push_back({"avx512_emulated", &kernels::EmulatedAvx512Table()});
  units.push_back({"zen4_emulated", &kernels::EmulatedZen4Table()});
#endif
#ifdef KVANTA_EMULATED_AVX512FP16
  units.push_back({"avx512fp16_emulated", &kernels::EmulatedAvx512Fp16Table()});
#endif
#ifdef KVANTA_EMULATED_AMX
  units.push_back({"amx_emulated", &kernels::EmulatedAmxTable()});
#endif
#ifdef KVANTA_THREAD_SANITIZED
  units.resize(1);
#endif
  return units;
}

// The same with the best one of avx512, avx512fp16 and zen4, which differ in the products of bf16 and fp8 alone.
inline std::vector<Unit> Units() {
  const auto is_avx512 = [](const Unit& unit) {
    return unit.name.starts_with("avx512") || unit.name.starts_with("zen4");
  };
  std::vector<Unit> units;
  for (const Unit& unit : AllUnits()) {
    if (!is_avx512(unit) || std::ranges::none_of(units, is_avx512)) units.push_back(unit);
  }
  return units;
}

}  // namespace kvanta::testing
