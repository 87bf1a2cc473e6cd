// Tolerances of the C++ tests, each with its derivation. u: half a unit in the last place of 1.
#pragma once

#include "base/dtype.h"

namespace kvanta::testing {

inline constexpr double kUnitF32 = 0x1p-24;
inline constexpr double kUnitBf16 = 0x1p-8;
inline constexpr double kUnitF16 = 0x1p-11;

// A chain of `terms` f32 multiply-adds rounds each product and each sum at most once:
// |error| <= ((1 + u)^(terms + 1) - 1) * (sum of |term|) < (terms + 2) u * (sum of |term|) for terms < 2^20
// (Higham, Accuracy and Stability, 3.5). One more for a bias.
constexpr double DotTolerance(long terms, double sum_of_magnitudes) {
  return static_cast<double>(terms + 3) * kUnitF32 * sum_of_magnitudes;
}

// A linear layer with quantized weights: integer dots are exact. A block adds the dot times the rounded product of two
// scales, and an offset times a rounded sum: two links of the chain above, whose terms are rounded twice more (a dot
// with 16-bit activations exceeds f32's precision).
constexpr double BlockDotTolerance(long blocks, double sum_of_magnitudes) {
  return DotTolerance(2 * blocks + 2, sum_of_magnitudes);
}

// Vectorized exp: the argument reduction and the polynomial err by less than 1.5 u each, the last sum and the scaling
// by u each.
inline constexpr double kExpRelative = 4 * kUnitF32;
// Spacing of results below 2^-126.
inline constexpr double kSubnormalStep = 0x1p-149;

// silu(g) * up: exp, one sum, one quotient, one product; the error of exp enters undamped for very negative g. The
// argument of exp is exact.
inline constexpr double kSiluRelative = kExpRelative + 3 * kUnitF32;

// x * (1 / sqrt(mean + eps)) * weight: half of the mean's relative error, which is (width / 16 + 8) u for positive
// terms, and five roundings.
constexpr double RmsNormRelative(long width) {
  return (static_cast<double>(width) / 32 + 4 + 6) * kUnitF32;
}

// Gated DeltaNet over `tokens` tokens, root mean square relative to the outputs': each token adds the errors of two
// chains over k_dim (the errors of exp and silu are small compared with them), and a state forgets them with its
// values. The norm after the rule divides by the outputs' size, which may be a tenth of their terms'.
constexpr double DeltaRuleRelative(int tokens, int k_dim) {
  return 10 * (2 * (k_dim / 2 + 3) + tokens) * kUnitF32;
}

// C (bias + sum over `taps` of weight (B x)), relative to the sum of the terms' magnitudes times C's: a product, a
// chain of fused or separate multiplications and additions, a product.
constexpr double ShortConvRelative(int taps) {
  return (2 * taps + 3) * kUnitF32;
}

// Mamba-2 over `tokens` tokens, likewise: one chain over the state per token.
constexpr double ScanRelative(int tokens, int state_size) {
  return 10 * (state_size / 2 + 3 + tokens) * kUnitF32;
}

// a cos - b sin: three roundings of magnitudes up to |a| + |b|.
inline constexpr double kRopeAbsolute = 3 * kUnitF32;

// ---- attention, compared with double precision on the same bytes

inline constexpr int kSlotsOfSplit = 1024;

// The largest operand of a row is exactly the number of steps; its value, the row's step, a scale and their products
// round once each.
inline constexpr double kOperandRelative = 6 * kUnitF32;

// Precision of the operands of a side's codes: `steps` of the largest one of a row for integer codes, of 16 bits for
// 8-bit codes and Lloyd-Max levels, of 8 for narrower integers and trellis codes, with unsigned probabilities. 0 steps:
// floating point, `relative` to each operand: 2^-17 for two terms of bf16, 2^-8 (kUnitBf16) for one
// (AttentionKernels::OperandsOf). `chain`: products that are summed with that precision, too, before sums are f32.
struct Operands {
  double steps = 0;
  double relative = 0x1p-17;
  int chain = 0;

  // Bound of a dot's error: (1 + chain) u * (sum of |term|), as DotTolerance.
  constexpr double Relative() const { return (1 + chain) * relative; }
  // Standard deviation, of independent terms: partial sums of up to n of them have a mean square of n / 2 terms', each
  // rounding has that of u / sqrt(3), and there are n.
  double Rms() const { return (1 + __builtin_sqrt(chain / 6.0)) * relative; }
};
// Axis queries (HarnessOptions::axis_queries) are among the values of every type of operands.
inline constexpr Operands kExactOperands = {.relative = 0};
inline Operands OperandsOfFloats(DType type) {
  constexpr int kChainProducts = 32;  // kernels/attention/cpu/x86/fp16_dots_avx512.h
  if (type == DType::kF16) return {.relative = kUnitF16, .chain = kChainProducts};
  return type == DType::kBf16 ? Operands{.relative = kUnitBf16} : Operands{};
}
// Steps of the operands of 8-bit codes and Lloyd-Max levels, which have 16 bits, and of those of narrower integers and
// trellis codes (kernels::HasByteOperands).
inline constexpr double kInt16OperandSteps = 32512;
inline constexpr double kInt8OperandSteps = 127;
inline constexpr double kUint8ProbSteps = 255;

// Upper bounds of queries or keys as they are multiplied, over rows.
struct RowSizes {
  double max = 0;               // magnitude of a quantized channel
  double norm = 0;              // norm of the quantized channels
  double unquantized_norm = 0;  // norm of outliers and of the rotary part of latents

  double Norm() const { return __builtin_sqrt(norm * norm + unquantized_norm * unquantized_norm); }
};

// For integer codes, a query is rounded to steps of its largest value: each element errs by at most half a step, their
// product with a key by sqrt(head_dim) / (2 steps) of q.max * k.norm (Cauchy-Schwarz). With scales per channel, a
// channel's product is rounded with its scale, for codes that times the largest scale reach at most the distance of two
// keys' values: head_dim / (2 steps) of q.max * 2 k.max. For floating-point codes, each element of a query has a
// relative precision, and its dot is a chain of head_dim f32 multiply-adds. Unquantized channels have operands of 16
// bits or more. `bias`: bound of a part of the dot in addition to q k. A softcap only reduces the error, and adds three
// roundings of its own magnitude.
inline double LogitError(Operands queries, int head_dim, const RowSizes& q, const RowSizes& k, bool channel_scales,
                         double bias, double scale, double softcap) {
  double coded = queries.Relative() * q.norm * k.norm;
  if (queries.steps > 0) {
    coded = q.max / (2 * queries.steps) * (channel_scales ? head_dim * 2 * k.max : __builtin_sqrt(head_dim) * k.norm);
  }
  const double unquantized = 0x1p-17 * q.unquantized_norm * k.unquantized_norm;
  const double rounded = (head_dim + 8) * kUnitF32 * (q.Norm() * k.Norm() + bias);
  return scale * (coded + unquantized + rounded) + (kExpRelative + 4 * kUnitF32) * softcap;
}

// Largest error of a mean of values of magnitude up to `largest_value` if each logit errs by up to `error`: weights p
// become p' = p e^d / sum(p e^d), |d| <= error. Half of sum |p' - p| is largest if all d are -error or error, and then
// for a share 1 / (1 + e^error) of p with +error: tanh(error / 2). A mean of values moves by at most that share of the
// distance between two of them.
inline double MeanError(double error, double largest_value) {
  return 2 * __builtin_tanh(error / 2) * largest_value;
}

// MeanError of the logits, whose exponentials err, too. For integer codes, each probability is rounded by half a step
// of the largest (sub-byte codes: of the largest p times the largest scale): over the slots of a page that is at most
// page_size / (2 steps) of the page's largest probability, and the sum includes every page's largest one, times the
// largest value without its offset. For floating-point codes probabilities have a relative precision. The rest are
// roundings of sums of positive terms: a page's slots, 64 pages of a KV split, 64 splits.
inline double AttentionTolerance(double logit_error, Operands probs, int page_size, double largest_value,
                                 double largest_coded) {
  const double weights = probs.steps > 0 ? page_size / (2 * probs.steps) : probs.Relative();
  return MeanError(logit_error + kExpRelative, largest_value) +
         (weights + (page_size + 128) * kUnitF32) * largest_coded;
}

// Bound of the root mean square over many outputs, which detects a missing term that the worst-case bounds above would
// not: rounding errors are independent, rounding to a step has a standard deviation of a step / sqrt(12), rounding of
// unit normal queries less than their precision, a logit sums head_dim of them times |k|, and a weighted mean does not
// exceed its values. Four times that. A logit itself, up to about scale * q_max * k_norm, has kOperandRelative.
inline double AttentionRms(Operands queries, Operands probs, double scale, double q_max, double k_norm, int page_size,
                           double value_rms) {
  const double step = 1 / __builtin_sqrt(12);
  const double logit =
      scale * k_norm * ((queries.steps > 0 ? q_max * step / queries.steps : queries.Rms()) + q_max * kOperandRelative);
  const double weights = probs.steps > 0 ? __builtin_sqrt(page_size) * step / probs.steps : probs.Rms();
  return 4 * (logit + weights + (page_size + 32) * kUnitF32) * value_rms;
}

// A linear layer on a GPU: tensor cores sum in f32 but truncate terms instead of rounding them: 2 u of the largest for
// each of a product's 16 terms and its sum. 8 partial sums, a power of two and a bias follow.
constexpr double GpuDotTolerance(long terms, double sum_of_magnitudes) {
  return DotTolerance(3 * terms + 16, sum_of_magnitudes);
}

// Row operations on a GPU compared with the CPU's, relative to the value or 1: sums of up to 1,024 squares in another
// order (each within 2^-24 sqrt(1024) of the sum, halved by the root), an exponential of 2^-22, and a few roundings.
inline constexpr double kGpuRowTolerance = 4e-6;

// AttentionTolerance for a GPU. Elements of queries and probabilities are f16 (relative error 2^-12) or two bf16 terms
// (2^-17). Tensor cores sum in f32 but truncate terms instead of rounding them: 2 u of the largest for each of a
// product's 16 terms and its sum, in a chain of head_dim / 16 products. ex2.approx and tanhf err by 2^-22 of their
// result and by 2 u. Keys with scales per channel are rounded to f16, too, as are scales that no f16 is. `rounded`: how
// many of a product's factors are rounded; axis queries are not.
inline double GpuAttentionTolerance(int head_dim, double logit, double softcap, double largest_value, int rounded) {
  const double error = (rounded * 0x1p-12 + (2 * head_dim + 16) * kUnitF32) * logit + 8 * kUnitF32 * softcap;
  return MeanError(error + 0x1p-22, largest_value) + (0x1p-11 + (2 * kSlotsOfSplit + 128) * kUnitF32) * largest_value +
         1e-37;
}
// Root mean square for unit normal inputs, far below the worst case: a logit of head_dim 128 errs by 2^-12 / sqrt(3) of
// its standard deviation, 1, and a probability by as much of itself; values have a standard deviation of 1. Four times
// that.
inline constexpr double kGpuAttentionRms = 4 * 2 * 0x1p-12 / 1.7;
// The same relative to the values, for logits up to `logit`: each of a dot's head_dim / 16 products truncates by up to
// 2 u of it; scales and the exponential's argument round a few times.
constexpr double GpuLargeAttentionRms(int head_dim, double logit) {
  return kGpuAttentionRms + 4 * (head_dim / 8 + 8) * kUnitF32 * logit;
}
// Root mean square for f32 cells: three bf16 terms have f32's 24 bits, and sums are f32; 4 times their unit. In
// addition, each of a logit's 6 head_dim / 16 products truncates its sum toward zero by half a unit, 2^-25, in the
// mean: of a partial sum that is half the logit's. Two terms, truncated to 16 bits, would exceed it.
constexpr double GpuF32AttentionRms(int head_dim) {
  return 0x1p-22 + 6.0 / 16 * head_dim * 0x1p-25 / 2;
}

// Factor by which 8-bit operands may increase the error of a sub-byte or trellis format: both errors are independent,
// and 8 bits of q or p are finer than the 6 or fewer of a key or a value.
inline constexpr double kSubbyteErrorGrowth = 1.1;

}  // namespace kvanta::testing
