// The roofline loops of one ISA unit (bench/isa_<isa>.cc, bench/x86/isa_<isa>.cc).
#pragma once

#include <cstdint>

#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {

struct RooflineTable {
  // Reads f32 [bytes / 4] as `streams` (1, 2, 4 or 8) equal parts at once, prefetching `ahead` bytes; bytes is a
  // multiple of 8 * 64. Returns the maximum, so that no read is dead.
  float (*read)(const float* data, int64_t bytes, int streams, int64_t ahead) noexcept = nullptr;
  // The loops below run `rounds` multiply-adds into each sum of a register tile. *operations: operations done, two per
  // multiply-add. The sums stay finite, and the result depends on all of them.
  float (*bf16_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*f32_fma)(int64_t rounds, double* operations) noexcept = nullptr;
  // Multiply-adds of fp16, on units that multiply fp8 by it; else null.
  float (*fp16_fma)(int64_t rounds, double* operations) noexcept = nullptr;
  // Dots of attention: f32 operands with codes that bf16 represents; 16-bit operands with 8-bit codes, in
  // `operand_terms` products each; 8-bit operands with codes below 8 bits.
  float (*bf16_terms_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*wide_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*subbyte_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  int operand_terms = 1;
  // Dots of linear layers: 32 codes of 8 or of 4 bits with 8-bit ones. All codes are 1, so the result is half the
  // operations.
  float (*int8_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*int4_dot)(int64_t rounds, double* operations) noexcept = nullptr;
};

const RooflineTable& PortableRooflineTable();
const RooflineTable& Avx2RooflineTable();
const RooflineTable& Zen4RooflineTable();
const RooflineTable& Avx512RooflineTable();
const RooflineTable& Avx512Fp16RooflineTable();
const RooflineTable& AmxRooflineTable();
const RooflineTable& NeonRooflineTable();
const RooflineTable& DotprodRooflineTable();
const RooflineTable& I8mmRooflineTable();

// The loops of a unit of the library. Throws InputError for a unit that has none.
const RooflineTable& RooflineOf(const IsaTable& isa);

}  // namespace kvanta::kernels
