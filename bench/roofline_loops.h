// Roofline loops, written once over the Vec16, block dots and products of an ISA unit; included by isa_<isa>.cc.
#pragma once

#include <cstdint>

#include "bench/roofline_table.h"
#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/table.h"

namespace kvanta::kernels {
namespace {

template <int kStreams>
float ReadStreams(const float* data, int64_t bytes, int64_t ahead) noexcept {
  const int64_t part = bytes / kStreams / static_cast<int64_t>(sizeof(float));
  const int64_t ahead_floats = ahead / static_cast<int64_t>(sizeof(float));
  Vec16::F maxima[kStreams];
#pragma GCC unroll 8
  for (int stream = 0; stream < kStreams; ++stream) maxima[stream] = Vec16::Zero();
  for (int64_t i = 0; i < part; i += Vec16::kLanes) {
#pragma GCC unroll 8
    for (int stream = 0; stream < kStreams; ++stream) {
      const float* p = data + stream * part + i;
      __builtin_prefetch(p + ahead_floats);
      maxima[stream] = Vec16::Max(Vec16::Load(p), maxima[stream]);
    }
  }
  Vec16::F all = maxima[0];
#pragma GCC unroll 8
  for (int stream = 1; stream < kStreams; ++stream) all = Vec16::Max(maxima[stream], all);
  return Vec16::MaxOf(all);
}

float ReadAll(const float* data, int64_t bytes, int streams, int64_t ahead) noexcept {
  switch (streams) {
    case 8:
      return ReadStreams<8>(data, bytes, ahead);
    case 4:
      return ReadStreams<4>(data, bytes, ahead);
    case 2:
      return ReadStreams<2>(data, bytes, ahead);
    default:
      return ReadStreams<1>(data, bytes, ahead);
  }
}

// Initial sums that are opaque to the compiler, which would otherwise merge equal sums into one.
KVANTA_INLINE void FillUnknown(float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = static_cast<float>(i);
  __asm__ volatile("" : "+r"(values) : : "memory");
}

KVANTA_INLINE float SumOf(const Vec16::F* sums) {
  Vec16::F all = sums[0];
#pragma GCC unroll 32
  for (int i = 1; i < Vec16::kTileSums; ++i) all = Vec16::Add(all, sums[i]);
  return Vec16::Sum(all);
}

// Multiply-adds whose sums converge to a fixed point: never subnormal, never infinite.
float F32FmaLoop(int64_t rounds, double* operations) noexcept {
  float values[Vec16::kTileSums * Vec16::kLanes];
  FillUnknown(values, Vec16::kTileSums * Vec16::kLanes);
  Vec16::F sums[Vec16::kTileSums];
#pragma GCC unroll 32
  for (int i = 0; i < Vec16::kTileSums; ++i) sums[i] = Vec16::Load(values + i * Vec16::kLanes);
  const Vec16::F half = Vec16::Set1(0.5f), one = Vec16::Set1(1.0f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < Vec16::kTileSums; ++i) sums[i] = Vec16::Fma(sums[i], half, one);
  }
  *operations = 2.0 * Vec16::kLanes * Vec16::kTileSums * static_cast<double>(rounds);
  return SumOf(sums);
}

// Adds 0 * 1, so the sums do not change.
float Bf16DotLoop(int64_t rounds, double* operations) noexcept {
  float values[Vec16::kTileSums * Vec16::kLanes];
  FillUnknown(values, Vec16::kTileSums * Vec16::kLanes);
  uint16_t ones[2 * Vec16::kLanes];
  for (uint16_t& code : ones) code = 0x3f80;
  const uint16_t* block = ones;
  __asm__ volatile("" : "+r"(block) : : "memory");
  Vec16::Bf16X zero = 0;
  __asm__ volatile("" : "+m"(zero));
  const Vec16::Bf16W w = Vec16::LoadBf16Block<0>(block);
  const auto x = Vec16::BroadcastBf16(&zero);
  Vec16::F sums[Vec16::kTileSums];
#pragma GCC unroll 32
  for (int i = 0; i < Vec16::kTileSums; ++i) sums[i] = Vec16::Load(values + i * Vec16::kLanes);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < Vec16::kTileSums; ++i) sums[i] = Vec16::DotBf16(x, w, sums[i]);
  }
  *operations = 2.0 * 2 / Vec16::kBf16Phases * Vec16::kLanes * Vec16::kTileSums * static_cast<double>(rounds);
  return SumOf(sums);
}

inline constexpr int kIntegerSums = (Vec16::kTileSums * 2 + 2) / 3;  // a spilled sum would cost more than its products

// Each sum is also an operand, multiplied by zeros, so that no product can be hoisted out of the loop.
template <class Dot>
float IntegerDotLoop(int64_t rounds, double* operations) noexcept {
  float values[(kIntegerSums + 1) * Vec16::kLanes];
  for (float& value : values) value = 0;
  FillUnknown(values, kIntegerSums * Vec16::kLanes);
  const Vec16::I zeros = Vec16::RoundToInt(Vec16::Load(values + kIntegerSums * Vec16::kLanes));
  Vec16::I sums[kIntegerSums];
#pragma GCC unroll 32
  for (int i = 0; i < kIntegerSums; ++i) sums[i] = Vec16::RoundToInt(Vec16::Load(values + i * Vec16::kLanes));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kIntegerSums; ++i) sums[i] = Dot::Add(sums[i], sums[i], zeros);
  }
  *operations = 2.0 * Dot::kProducts * kIntegerSums * static_cast<double>(rounds);
  float all = 0;
#pragma GCC unroll 32
  for (int i = 0; i < kIntegerSums; ++i) all += Vec16::Sum(Vec16::FromInt(sums[i]));
  return all;
}

// Exact dots of blocks as in the matrix product, without the scales: ones by ones, operands in L1, a register tile of
// rows at a time.
template <weights::BlockFormat kFormat>
float BlockDotLoop(int64_t rounds, double* operations) noexcept {
  constexpr BlockLayout kLayout = LayoutOf(kFormat);
  using Dots = BlockDots<kLayout, false>;
  constexpr int kRows = Dots::kRowTile;
  uint8_t weights[kLayout.CodeBytes()];
  for (uint8_t& codes : weights) codes = kLayout.low_bits == 4 ? 0x11 : 1;
  int32_t ones[32];
  for (int32_t& code : ones) code = 1;
  typename Dots::X rows[kRows];
  for (auto& row : rows) Dots::Store(ones, row);
  const uint8_t* w = weights;
  const auto* x = reinterpret_cast<const uint8_t*>(rows);
  Vec16::F sums[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) sums[i] = Vec16::Zero();
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+r"(w), "+r"(x) : : "memory");  // no dot can be hoisted out of the loop
    Vec16::I dots[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) dots[i] = Vec16::SetInt(0);
    Dots::template AddDots<kRows, 0>(w, x, sizeof(typename Dots::X), dots);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sums[i] = Vec16::Add(sums[i], Vec16::FromInt(dots[i]));
  }
  *operations = 2.0 * kPanelColumns * 32 * kRows * static_cast<double>(rounds);
  float all = 0;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) all += Vec16::Sum(sums[i]);
  return all;
}

constexpr RooflineTable kRooflineTable{.read = ReadAll,
                                       .bf16_dot = Bf16DotLoop,
                                       .f32_fma = F32FmaLoop,
                                       .bf16_terms_dot = F32FmaLoop,
                                       .wide_dot = IntegerDotLoop<WideProducts>,
                                       .subbyte_dot = IntegerDotLoop<SubbyteProducts>,
                                       .operand_terms = WideProducts::kTerms,
                                       .int8_dot = BlockDotLoop<weights::BlockFormat::kQ8_0>,
                                       .int4_dot = BlockDotLoop<weights::BlockFormat::kQ4_0>};

}  // namespace
}  // namespace kvanta::kernels
