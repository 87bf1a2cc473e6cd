// ISA units that a test can run: the machine's, and emulated AVX-512 and AMX on machines without them.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cpu/select.h"
#include "kernels/ops.h"

namespace kvanta::kernels {

const IsaTable& EmulatedAvx512Table();
const IsaTable& EmulatedZen4Table();
const IsaTable& EmulatedAmxTable();

}  // namespace kvanta::kernels

namespace kvanta::testing {

struct Unit {
  std::string name;  // a C++ identifier
  const kernels::IsaTable* table;
};

inline bool HasUnit(const std::vector<Unit>& units, std::string_view name) {
  return std::ranges::any_of(units, [&](const Unit& unit) { return unit.name == name; });
}

// True for units that differ from zen4, which the machine has, in the products of bf16 weights, or of bf16 and fp8
// codes, alone.
inline bool IsLikeZen4(const std::vector<Unit>& units, std::string_view isa) {
  return HasUnit(units, "zen4") && isa.starts_with("avx512");
}

// Units that differ in more than the products of bf16 weights, and of bf16 and fp8 codes; for the thread sanitizer, the
// best one.
inline std::vector<Unit> Units() {
  std::vector<Unit> units;
  for (const char* isa : kernels::RunnableIsas()) {
    const kernels::IsaTable& table = kernels::SelectIsa(isa);
    const bool is_new =
        std::ranges::none_of(units, [&](const Unit& u) { return u.table->attention == table.attention; });
    if (is_new && !IsLikeZen4(units, isa)) units.push_back({isa, &table});
  }
#ifdef KVANTA_EMULATED_AVX512
  units.push_back({"avx512_emulated", &kernels::EmulatedAvx512Table()});
#endif
#ifdef KVANTA_EMULATED_AMX
  units.push_back({"amx_emulated", &kernels::EmulatedAmxTable()});
#endif
#ifdef KVANTA_THREAD_SANITIZED
  units.resize(1);  // the others differ from the best in arithmetic alone
#endif
  return units;
}

// The same, and AVX-512 with both kinds of products of bf16 and fp8 codes.
inline std::vector<Unit> AttentionUnits() {
  std::vector<Unit> units = Units();
#ifdef KVANTA_THREAD_SANITIZED
  return units;
#endif
#ifdef KVANTA_EMULATED_AVX512
  units.push_back({"zen4_emulated", &kernels::EmulatedZen4Table()});
#endif
#if defined(__x86_64__)
  if (HasUnit(units, "zen4")) {
    units.push_back({"avx512", &kernels::Avx512Table()});
  } else if (HasUnit(units, "avx512")) {
    units.push_back({"zen4", &kernels::Zen4Table()});
  }
#endif
  return units;
}

// Units that differ in linear layers, in which zen4 is avx512; for the thread sanitizer, the best one.
inline std::vector<Unit> ElementUnits() {
  std::vector<Unit> units = Units();
#ifdef KVANTA_THREAD_SANITIZED
  return units;
#endif
  std::erase_if(units, [](const Unit& unit) { return unit.name == "zen4"; });
  for (const std::string_view isa : kernels::RunnableIsas()) {
    if (isa != "zen4" && !HasUnit(units, isa)) units.push_back({std::string(isa), &kernels::SelectIsa(isa)});
  }
  return units;
}

}  // namespace kvanta::testing
