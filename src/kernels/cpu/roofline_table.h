// Loops of one ISA unit that do nothing but reach a limit of the machine (machine_limits.h).
#pragma once

#include <cstdint>

namespace kvanta::kernels {

struct LimitKernels {
  // Reads f32 [bytes / 4] as `streams` (1, 2, 4 or 8) equal parts at once, asking for what lies `ahead` bytes further;
  // bytes is a multiple of 8 * 64. Returns the largest value, so that nothing is left out.
  float (*read)(const float* data, int64_t bytes, int streams, int64_t ahead) noexcept = nullptr;
  // `rounds` multiply-adds into each of the sums of a register tile; *operations: what was done, two per
  // multiply-add. The sums stay finite. The result depends on all of them.
  float (*bf16_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*f32_fma)(int64_t rounds, double* operations) noexcept = nullptr;
  // Dots of attention: of f32 coefficients with codes that bf16 holds; of integers, 8-bit codes and narrower ones; how
  // many of the first it takes to multiply with a coefficient of 16 bits.
  float (*bf16_terms_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*wide_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*subbyte_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  int operand_terms = 1;
  // Dots of linear layers: 32 codes of 8 and of 4 bits with 8-bit ones, ones by ones: the result is half the
  // operations.
  float (*int8_dot)(int64_t rounds, double* operations) noexcept = nullptr;
  float (*int4_dot)(int64_t rounds, double* operations) noexcept = nullptr;
};

}  // namespace kvanta::kernels
