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

// A linear layer on blocks: integer dots are exact. A block adds a product of the dot with the rounded product of two
// scales, and a minimum times a rounded sum: two steps of the chain above, whose terms are rounded twice more (a dot
// with activations of 16 bits is more than f32 holds).
constexpr double BlockDotTolerance(long blocks, double sum_of_magnitudes) {
  return DotTolerance(2 * blocks + 2, sum_of_magnitudes);
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

// ---- attention, against double on the same bytes

inline constexpr int kSlotsOfSplit = 1024;

// One coefficient, the largest of its row, is all steps exactly; it, the row's unit, a scale and their products round
// once each.
inline constexpr double kOperandRelative = 6 * kUnitF32;

// Steps of the largest of a row's coefficients that a kernel keeps: 16 bits for whole bytes (and for codes that become
// such), 8 for narrower integers, where weights have no sign. 0: floats.
inline constexpr double kByteSteps = 32512;
inline constexpr double kSubbyteSteps = 127;
inline constexpr double kSubbyteProbSteps = 255;

// An integer code's query is rounded to steps of its largest value: each element errs by at most half a step, the row's
// norm by sqrt(head_dim) * |q| / (2 steps), a logit by that share of |q| |k| (Cauchy-Schwarz). A float code's query is
// kept to 2^-17 (two bf16 terms), and its dot is a chain of head_dim f32 multiply-adds. A softcap only shrinks the
// error, and adds three roundings of its own size.
inline double LogitError(double steps, int head_dim, double logit, double softcap) {
  const double query = steps > 0 ? __builtin_sqrt(head_dim) / (2 * steps) : 0x1p-17;
  return (query + (head_dim + 8) * kUnitF32) * logit + (kExpRelative + 4 * kUnitF32) * softcap;
}

// exp turns a logit's error into a relative one, in the numerator and in the sum. An integer code's weights are rounded
// to half a step of the largest each (narrow codes': of the largest p times the largest scale): over the slots of a
// page that is at most page_size / (2 steps) of the page's largest weight, and the sum holds every page's largest
// weight. A float code's weights keep 2^-17. The rest are roundings of sums of positive weights: a page's slots, 64
// pages of a run, 64 runs.
inline double AttentionTolerance(double logit_error, double steps, int page_size, double largest_value) {
  const double weights = steps > 0 ? page_size / (2 * steps) : 0x1p-17;
  return (__builtin_expm1(2 * (logit_error + kExpRelative)) + weights + (page_size + 128) * kUnitF32) * largest_value;
}

// The bounds above add up worst cases. Rounding errors are independent, and over many outputs their root mean square
// shows a lost term that no single output would: rounding to a step has a standard deviation of a step / sqrt(12),
// a logit sums head_dim of them against |k|, a weighted mean does not exceed its values. Four times that.
inline double AttentionRms(double k_steps, double v_steps, double scale, double q_max, double q_norm, double k_norm,
                           int page_size, double value_rms) {
  const double logit = scale * k_norm * (k_steps > 0 ? q_max / (k_steps * __builtin_sqrt(12)) : q_norm * 0x1p-17);
  const double weights = v_steps > 0 ? __builtin_sqrt(page_size) / (v_steps * __builtin_sqrt(12)) : 0x1p-17;
  return 4 * (logit + weights + (page_size + 32) * kUnitF32) * value_rms;
}

// A linear layer on a GPU: its tensor cores sum in f32, but cut terms off instead of rounding them: 2 u of the largest
// for each of a product's 16 terms and its sum. 8 shares, a power of two and a bias follow.
constexpr double GpuDotTolerance(long terms, double sum_of_magnitudes) {
  return DotTolerance(3 * terms + 16, sum_of_magnitudes);
}

// Operations on rows on a GPU against the CPU's, relative to the value or 1: sums of up to 1,024 squares in another
// order (each side within 2^-24 sqrt(1024) of the sum, halved by the root), an exponential of 2^-22, and a few
// roundings.
inline constexpr double kGpuRowTolerance = 4e-6;

// The same of a GPU. An element of a query and a weight are f16 (2^-12 of themselves), or two bf16 terms (2^-17).
// Tensor cores sum in f32 but cut terms off instead of rounding them: 2 u of the largest for each of a product's 16
// terms and its sum, and head_dim / 16 products follow one another. ex2.approx and tanhf err by 2^-22 of their result
// and by 2 u. Keys whose channels have scales are rounded to f16, too.
inline double GpuAttentionTolerance(int head_dim, double logit, double softcap, double largest_value,
                                    bool rounded_keys = false) {
  const double rounded = rounded_keys ? 2 * 0x1p-12 : 0x1p-12;
  const double error = (rounded + (2 * head_dim + 16) * kUnitF32) * logit + 8 * kUnitF32 * softcap;
  return (__builtin_expm1(2 * (error + 0x1p-22)) + 0x1p-11 + (2 * kSlotsOfSplit + 128) * kUnitF32) * largest_value +
         1e-37;
}
// Of unit normal inputs the root mean square is far below: a logit of head_dim 128 errs by 2^-12 / sqrt(3) of its
// standard deviation, 1, and a weight by as much of itself; values are of standard deviation 1, and 4 times that is
// room.
inline constexpr double kGpuAttentionRms = 4 * 2 * 0x1p-12 / 1.7;
// Of f32 cells: three terms of bf16 each are f32's 24 bits, and sums are f32's; 4 times their unit. Two terms, of 16
// bits and cut off, would be beyond.
inline constexpr double kGpuF32AttentionRms = 0x1p-22;

// What coefficients of 8 bits may add to a narrow format's own error, as a factor: both are independent, and 8 bits of
// q or p are finer than the 6 or fewer of a key or a value.
inline constexpr double kSubbyteErrorGrowth = 1.1;

}  // namespace kvanta::testing
