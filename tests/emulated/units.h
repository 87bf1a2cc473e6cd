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
const IsaTable& EmulatedAvx512Fp8DotsTable();
const IsaTable& EmulatedAmxTable();

}  // namespace kvanta::kernels

namespace kvanta::testing {

struct Unit {
  std::string name;  // a C++ identifier
  const kernels::IsaTable* table;
};

inline bool HasAttention(const std::vector<Unit>& units, const kernels::IsaTable& table) {
  return std::ranges::any_of(units, [&](const Unit& unit) { return unit.table->attention == table.attention; });
}

// Units that differ in more than the products of bf16 weights and of fp8 codes; for the thread sanitizer, the best one.
inline std::vector<Unit> Units() {
  std::vector<Unit> units;
  for (const char* isa : kernels::RunnableIsas()) {
    const bool is_variant = std::string_view(isa) == "avx512vnni" && !units.empty();  // of a better unit
    const kernels::IsaTable& table = kernels::SelectIsa(isa);
    if (!is_variant && !HasAttention(units, table)) units.push_back({isa, &table});
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

// The same, and AVX-512 with both kinds of products of fp8 codes.
inline std::vector<Unit> AttentionUnits() {
  std::vector<Unit> units = Units();
#ifdef KVANTA_EMULATED_AVX512
  units.push_back({"avx512_fp8_dots_emulated", &kernels::EmulatedAvx512Fp8DotsTable()});
#endif
#if defined(__x86_64__)
  if (std::ranges::none_of(units, [](const Unit& unit) { return unit.name == "avx512"; })) return units;
  if (!HasAttention(units, kernels::Avx512VnniTable())) units.push_back({"avx512vnni", &kernels::Avx512VnniTable()});
  if (!HasAttention(units, kernels::Avx512Fp8DotsTable()))
    units.push_back({"avx512_fp8_dots", &kernels::Avx512Fp8DotsTable()});
#endif
  return units;
}

// All units; for the thread sanitizer, the best one.
inline std::vector<Unit> ElementUnits() {
  std::vector<Unit> units = Units();
#ifdef KVANTA_THREAD_SANITIZED
  return units;
#endif
  for (const char* isa : kernels::RunnableIsas()) {
    const bool is_new = std::ranges::none_of(units, [&](const Unit& unit) { return unit.name == isa; });
    if (is_new) units.push_back({isa, &kernels::SelectIsa(isa)});
  }
  return units;
}

}  // namespace kvanta::testing
