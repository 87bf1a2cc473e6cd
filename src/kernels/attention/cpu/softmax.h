// Online softmax; included by isa_<isa>.cc after operands.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// softcap * tanh(x / softcap) of logits to base 2; tanh(y) = 1 - 2 / (exp(2 y) + 1).
KVANTA_INLINE Vec16::F Softcap(Vec16::F x, float softcap) {
  const Vec16::F one = Vec16::Set1(1.0f);
  const Vec16::F e = Vec16::Exp(Vec16::Mul(x, Vec16::Set1(2.0f / (kLog2E * softcap))));
  const Vec16::F tanh = Vec16::Sub(one, Vec16::Div(Vec16::Set1(2.0f), Vec16::Add(e, one)));
  return Vec16::Mul(tanh, Vec16::Set1(kLog2E * softcap));
}

// Applies bias and softcap to the logits of a row and masks those outside [begin, end).
KVANTA_INLINE void MaskLogits(const SoftmaxPass& pass, int row, int first, int last) {
  float* scores = pass.scores + row * kMaxPageTokens;
  for (int t = first; t < last; t += 16) {
    Vec16::F x = Vec16::Load(scores + t);
    if (pass.bias) x = Vec16::Add(x, Vec16::Set1(pass.bias[row]));
    if (pass.softcap > 0) x = Softcap(x, pass.softcap);
    if (t < pass.begin || pass.end < t + 16) x = SelectRange(x, kNegativeInfinity, pass.begin - t, pass.end - t);
    Vec16::Store(scores + t, x);
  }
}

// Maxima of kRows rows over the tokens [first, last); kRows is 1 or 4.
template <int kRows>
KVANTA_INLINE void MaximaOfRows(const float* scores, int first, int last, float* maxima) {
  Vec16::F max[kRows];
  for (int r = 0; r < kRows; ++r) max[r] = Vec16::Load(scores + r * kMaxPageTokens + first);
#pragma GCC unroll 4
  for (int t = first + 16; t < last; t += 16) {
    for (int r = 0; r < kRows; ++r) max[r] = Vec16::Max(max[r], Vec16::Load(scores + r * kMaxPageTokens + t));
  }
  if constexpr (kRows == 4) {
    Vec16::MaximaOf(max, maxima);
  } else {
    maxima[0] = Vec16::MaxOf(max[0]);
  }
}

// Vectors whose powers fit the registers at once.
inline constexpr int kPowersAtOnce = kManyRegisters ? 4 : 2;

// Stores p in place of the scores.
struct InPlace {
  static KVANTA_INLINE void Store(const SoftmaxPass& pass, int row, int token, Vec16::F p) {
    Vec16::Store(pass.scores + row * kMaxPageTokens + token, p);
  }
};
// Stores p as the operands that Accumulate<Decoder>() multiplies values by.
template <class Decoder>
struct AsOperands {
  static KVANTA_INLINE void Store(const SoftmaxPass& pass, int row, int token, Vec16::F p) {
    const float scale = HasScaledOperands<Decoder>() ? MaxOperand<Decoder>() : pass.value_scale;
    Decoder::Pack(Vec16::Mul(p, Vec16::Set1(scale)),
                  pass.operands + row * kProbRowBytes<Decoder::kOperandBytes> + token * Decoder::kOperandBytes);
  }
};

// Computes p = 2^(score - max) of rows [row, row + kRows), in batches of kPowersAtOnce vectors; kRows is 1 or 4.
// Returns the rows' sums over the tokens [first, last), in their order, which does not depend on kRows.
template <class Probs, int kRows>
KVANTA_INLINE void PowersOfRows(const SoftmaxPass& pass, int row, int first, int last, const float* max, float* sums,
                                Prefetcher& prefetch) {
  constexpr int kAtOnce = kRows == 1 ? 1 : kPowersAtOnce;
  Vec16::F sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = Vec16::Zero();
  for (int t = first; t < last; t += 16) {
    prefetch.Steps<(kRows + 1) / 2>();
    for (int from = 0; from < kRows; from += kAtOnce) {
      const float* x = pass.scores + (row + from) * kMaxPageTokens + t;
      Vec16::F p[kAtOnce];  // masked: 2^-infinity = 0
      for (int i = 0; i < kAtOnce; ++i) {
        p[i] = Vec16::Sub(Vec16::Load(x + i * kMaxPageTokens), Vec16::Set1(max[from + i]));
      }
      Exp2OfNegative<Vec16, kAtOnce>(p);
      for (int i = 0; i < kAtOnce; ++i) Probs::Store(pass, row + from + i, t, p[i]);
      for (int i = 0; i < kAtOnce; ++i) sum[from + i] = Vec16::Add(sum[from + i], p[i]);
    }
  }
  if constexpr (kRows == 4) {
    Vec16::SumsOf(sum, sums);
  } else {
    sums[0] = Vec16::Sum(sum[0]);
  }
}

// Calls f(RowCount<4>, row) for rows by four, then f(RowCount<1>, row) for the others.
template <class F>
KVANTA_INLINE void ByFourRows(int rows, F f) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) f(RowCount<4>{}, row);
  for (; row < rows; ++row) f(RowCount<1>{}, row);
}

// Probs: how p is stored.
template <class Probs>
void Softmax(const SoftmaxPass& pass) {
  const int first = pass.begin / 16 * 16, last = static_cast<int>(RoundUp(pass.end, 16));
  Prefetcher prefetch{pass.prefetch, (pass.rows / 4 * 2 + pass.rows % 4) * (last - first) / 16};
  if (pass.bias || pass.softcap > 0 || pass.begin != first || pass.end != last) {
    for (int row = 0; row < pass.rows; ++row) MaskLogits(pass, row, first, last);
  }
  alignas(64) float max[kPassRows] = {}, rescale[kPassRows] = {}, sums[kPassRows];
  ByFourRows(pass.rows, [&]<int kRows>(RowCount<kRows>, int row) {
    MaximaOfRows<kRows>(pass.scores + row * kMaxPageTokens, first, last, max + row);
  });
  for (int row = 0; row < pass.rows; ++row) {
    const float old_max = pass.state[row].max;
    max[row] = old_max > max[row] ? old_max : max[row];
    rescale[row] = old_max - max[row];  // -infinity on the first page, and 2^-infinity is 0
  }
  ByFourRows(pass.rows, [&]<int kRows>(RowCount<kRows>, int row) {
    PowersOfRows<Probs, kRows>(pass, row, first, last, max + row, sums + row, prefetch);
  });
  Vec16::F deltas = Vec16::Load(rescale);
  Exp2OfNegative<Vec16, 1>(&deltas);
  Vec16::Store(rescale, deltas);
  for (int row = 0; row < pass.rows; ++row) {
    SoftmaxState& state = pass.state[row];
    state.sum = state.sum * rescale[row] + sums[row];
    state.max = max[row];
    pass.rescale[row] = rescale[row];
  }
}

}  // namespace
}  // namespace kvanta::kernels
