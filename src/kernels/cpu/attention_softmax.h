// Online softmax and the merge of partial results; included by isa_<isa>.cc after attention_kernels.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_kernels.h"
#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// softcap * tanh(x / softcap), of logits in powers of 2; tanh(y) = 1 - 2 / (exp(2 y) + 1).
KVANTA_INLINE Lanes::F Softcap(Lanes::F x, float softcap) {
  const Lanes::F one = Lanes::Set1(1.0f);
  const Lanes::F e = Lanes::Exp(Lanes::Mul(x, Lanes::Set1(2.0f / (kLog2E * softcap))));
  const Lanes::F tanh = Lanes::Sub(one, Lanes::Div(Lanes::Set1(2.0f), Lanes::Add(e, one)));
  return Lanes::Mul(tanh, Lanes::Set1(kLog2E * softcap));
}

// 2^x of one number x <= 0.
KVANTA_INLINE float Exp2One(float x) {
  float lanes[16];
  Lanes::F power = Lanes::Set1(x);
  Exp2OfNegative<Lanes, 1>(&power);
  Lanes::Store(lanes, power);
  return lanes[0];
}

// The logits of a row, masked outside [begin, end); returns the largest.
KVANTA_INLINE float MaskLogits(const SoftmaxPass& pass, int row, int first, int last, Prefetcher& prefetch) {
  prefetch.Step();
  float* scores = pass.scores + row * kMaxPageTokens;
  Lanes::F peak = Lanes::Set1(kNegativeInfinity);
  for (int t = first; t < last; t += 16) {
    Lanes::F x = Lanes::Load(scores + t);
    const bool whole = pass.begin <= t && t + 16 <= pass.end;
    if (pass.softcap > 0) {
      if (pass.bias) x = Lanes::Add(x, Lanes::Set1(pass.bias[row]));
      x = Softcap(x, pass.softcap);
    }
    if (!whole) x = KeepOr(x, kNegativeInfinity, pass.begin - t, pass.end - t);
    if (!whole || pass.softcap > 0) Lanes::Store(scores + t, x);
    peak = Lanes::Max(peak, x);
  }
  return Lanes::MaxOf(peak);
}

template <int kCount>
struct Many {};

void Softmax(const SoftmaxPass& pass) {
  const int first = pass.begin / 16 * 16, last = static_cast<int>(RoundUp(pass.end, 16));
  Prefetcher prefetch{pass.prefetch, pass.rows * (1 + (last - first + 31) / 32)};
  // Rows in two sweeps, so that the long chains of one row's reductions overlap with the next row's.
  float top[16] = {};
  float change[16] = {};
  for (int row = 0; row < pass.rows; ++row) {
    const float page = MaskLogits(pass, row, first, last, prefetch);
    const float before = pass.state[row].max;
    top[row] = before > page ? before : page;
    change[row] = before - top[row];  // -infinity before the first page: 2 to that is 0
  }
  float rescale[16];
  Lanes::F changes = Lanes::Load(change);
  Exp2OfNegative<Lanes, 1>(&changes);
  Lanes::Store(rescale, changes);
  for (int row = 0; row < pass.rows; ++row) {
    float* scores = pass.scores + row * kMaxPageTokens;
    const Lanes::F highest = Lanes::Set1(top[row]);
    Lanes::F sum = Lanes::Zero();
    const auto add = [&]<int kCount>(Many<kCount>, int t) {
      Lanes::F p[kCount];  // masked: 2^-infinity = 0
      prefetch.Step();
      for (int i = 0; i < kCount; ++i) p[i] = Lanes::Sub(Lanes::Load(scores + t + 16 * i), highest);
      Exp2OfNegative<Lanes, kCount>(p);
      for (int i = 0; i < kCount; ++i) Lanes::Store(scores + t + 16 * i, p[i]);
      for (int i = 0; i < kCount; ++i) sum = Lanes::Add(sum, p[i]);
    };
    int t = first;
    for (; t + 32 <= last; t += 32) add(Many<2>{}, t);
    if (t < last) add(Many<1>{}, t);
    SoftmaxState& state = pass.state[row];
    state.sum = state.sum * rescale[row] + Lanes::Sum(sum);
    state.max = top[row];
    pass.rescale[row] = rescale[row];
  }
}

// As LoadChannels().
KVANTA_INLINE void StoreChannels(float* row, int channel, int head_dim, Lanes::F x) {
  if (channel + 16 <= head_dim) {
    Lanes::Store(row + channel, x);
  } else {
    Lanes::StoreTail(row + channel, x, head_dim - channel);
  }
}

void Merge(SoftmaxState& state, float* out, const SoftmaxState& other, const float* other_out, int head_dim) {
  if (other.max == kNegativeInfinity) return;
  if (state.max == kNegativeInfinity) {
    state = other;
    __builtin_memcpy(out, other_out, sizeof(float) * static_cast<size_t>(head_dim));
    return;
  }
  const float top = state.max > other.max ? state.max : other.max;
  const float keep = Exp2One(state.max - top);
  const float add = Exp2One(other.max - top);
  for (int c = 0; c < head_dim; c += 16) {
    const Lanes::F mine = Lanes::Mul(LoadChannels(out, c, head_dim), Lanes::Set1(keep));
    const Lanes::F theirs = Lanes::Mul(LoadChannels(other_out, c, head_dim), Lanes::Set1(add));
    StoreChannels(out, c, head_dim, Lanes::Add(mine, theirs));
  }
  state.sum = state.sum * keep + other.sum * add;
  state.max = top;
}

void Normalize(const SoftmaxState& state, const float* out, int head_dim, float* result) {
  const Lanes::F inverse = Lanes::Set1(1.0f / state.sum);
  for (int c = 0; c < head_dim; c += 16) {
    StoreChannels(result, c, head_dim, Lanes::Mul(LoadChannels(out, c, head_dim), inverse));
  }
}

}  // namespace
}  // namespace kvanta::kernels
