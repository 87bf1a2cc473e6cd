// Every tolerance of the C++ tests, each with where it comes from. u is half a unit in the last place of 1.
#pragma once

namespace kvanta::testing {

inline constexpr double kUnitF32 = 0x1p-24;
inline constexpr double kUnitBf16 = 0x1p-8;

// A chain of `terms` f32 multiply-adds rounds each product and each sum at most once: |error| <= ((1 + u)^(terms + 1) -
// 1)
// * (sum of |term|) < (terms + 2) u * (sum of |term|) for terms < 2^20 (Higham, Accuracy and Stability, 3.5). One more
// for a bias.
constexpr double DotTolerance(long terms, double sum_of_magnitudes) {
  return static_cast<double>(terms + 3) * kUnitF32 * sum_of_magnitudes;
}

// exp over lanes: the reduction and the polynomial err by under 1.5 u each, the last sum and the scaling by u each.
inline constexpr double kExpRelative = 4 * kUnitF32;
// Below 2^-126 the result has a fixed step.
inline constexpr double kSubnormalStep = 0x1p-149;

// silu(g) * up: exp, one sum, one quotient, one product; the exp's share enters undamped where g is very negative. The
// argument of exp is exact.
inline constexpr double kSiluRelative = kExpRelative + 3 * kUnitF32;

// x * (1 / sqrt(mean + eps)) * weight: the mean's relative error, (width / 16 + 8) u of positive terms, counts half;
// five roundings follow.
constexpr double RmsNormRelative(long width) {
  return (static_cast<double>(width) / 32 + 4 + 6) * kUnitF32;
}

// a cos - b sin: three roundings, of magnitudes |a| + |b|.
inline constexpr double kRopeAbsolute = 3 * kUnitF32;

}  // namespace kvanta::testing
