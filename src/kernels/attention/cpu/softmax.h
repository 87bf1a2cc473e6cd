// Online softmax, and the combination of split results; included by isa_<isa>.cc after operands.h.
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

// 2^x of a scalar x <= 0.
KVANTA_INLINE float Exp2One(float x) {
  float lanes[16];
  Vec16::F power = Vec16::Set1(x);
  Exp2OfNegative<Vec16, 1>(&power);
  Vec16::Store(lanes, power);
  return lanes[0];
}

// Applies bias and softcap to the logits of a row and masks those outside [begin, end), all of which `changes` says is
// needed; returns the maximum.
KVANTA_INLINE float MaskLogits(const SoftmaxPass& pass, int row, int first, int last, bool changes,
                               Prefetcher& prefetch) {
  prefetch.Step();
  float* scores = pass.scores + row * kMaxPageTokens;
  Vec16::F max = Vec16::Set1(kNegativeInfinity);
  if (!changes) {  // most pages
#pragma GCC unroll 4
    for (int t = first; t < last; t += 16) max = Vec16::Max(max, Vec16::Load(scores + t));
    return Vec16::MaxOf(max);
  }
  for (int t = first; t < last; t += 16) {
    Vec16::F x = Vec16::Load(scores + t);
    const bool whole = pass.begin <= t && t + 16 <= pass.end;
    if (pass.bias) x = Vec16::Add(x, Vec16::Set1(pass.bias[row]));
    if (pass.softcap > 0) x = Softcap(x, pass.softcap);
    if (!whole) x = SelectRange(x, kNegativeInfinity, pass.begin - t, pass.end - t);
    if (!whole || pass.bias || pass.softcap > 0) Vec16::Store(scores + t, x);
    max = Vec16::Max(max, x);
  }
  return Vec16::MaxOf(max);
}

template <int kCount>
struct IntConstant {};

void Softmax(const SoftmaxPass& pass) {
  const int first = pass.begin / 16 * 16, last = static_cast<int>(RoundUp(pass.end, 16));
  Prefetcher prefetch{pass.prefetch, pass.rows * (1 + (last - first + 31) / 32)};
  // Two loops over the rows, so that the dependency chains of one row's reductions overlap with the next row's.
  const bool changes = pass.bias || pass.softcap > 0 || pass.begin != first || pass.end != last;
  float new_max[16] = {};
  float delta[16] = {};
  for (int row = 0; row < pass.rows; ++row) {
    const float page_max = MaskLogits(pass, row, first, last, changes, prefetch);
    const float old_max = pass.state[row].max;
    new_max[row] = old_max > page_max ? old_max : page_max;
    delta[row] = old_max - new_max[row];  // -infinity on the first page, and 2^-infinity is 0
  }
  float rescale[16];
  Vec16::F deltas = Vec16::Load(delta);
  Exp2OfNegative<Vec16, 1>(&deltas);
  Vec16::Store(rescale, deltas);
  for (int row = 0; row < pass.rows; ++row) {
    float* scores = pass.scores + row * kMaxPageTokens;
    const Vec16::F row_max = Vec16::Set1(new_max[row]);
    Vec16::F sum = Vec16::Zero();
    const auto add = [&]<int kCount>(IntConstant<kCount>, int t) {
      Vec16::F p[kCount];  // masked: 2^-infinity = 0
      prefetch.Step();
      for (int i = 0; i < kCount; ++i) p[i] = Vec16::Sub(Vec16::Load(scores + t + 16 * i), row_max);
      Exp2OfNegative<Vec16, kCount>(p);
      for (int i = 0; i < kCount; ++i) Vec16::Store(scores + t + 16 * i, p[i]);
      for (int i = 0; i < kCount; ++i) sum = Vec16::Add(sum, p[i]);
    };
    int t = first;
    for (; t + 32 <= last; t += 32) add(IntConstant<2>{}, t);
    if (t < last) add(IntConstant<1>{}, t);
    SoftmaxState& state = pass.state[row];
    state.sum = state.sum * rescale[row] + Vec16::Sum(sum);
    state.max = new_max[row];
    pass.rescale[row] = rescale[row];
  }
}

// Stores channels as LoadChannels() loads them.
KVANTA_INLINE void StoreChannels(float* row, int channel, int head_dim, Vec16::F x) {
  if (channel + 16 <= head_dim) {
    Vec16::Store(row + channel, x);
  } else {
    Vec16::StoreTail(row + channel, x, head_dim - channel);
  }
}

void Combine(SoftmaxState& state, float* out, const SoftmaxState& other, const float* other_out, int head_dim) {
  if (other.max == kNegativeInfinity) return;
  if (state.max == kNegativeInfinity) {
    state = other;
    __builtin_memcpy(out, other_out, sizeof(float) * static_cast<size_t>(head_dim));
    return;
  }
  const float new_max = state.max > other.max ? state.max : other.max;
  const float keep = Exp2One(state.max - new_max);
  const float add = Exp2One(other.max - new_max);
  for (int c = 0; c < head_dim; c += 16) {
    const Vec16::F mine = Vec16::Mul(LoadChannels(out, c, head_dim), Vec16::Set1(keep));
    const Vec16::F theirs = Vec16::Mul(LoadChannels(other_out, c, head_dim), Vec16::Set1(add));
    StoreChannels(out, c, head_dim, Vec16::Add(mine, theirs));
  }
  state.sum = state.sum * keep + other.sum * add;
  state.max = new_max;
}

void Normalize(const SoftmaxState& state, const float* out, int head_dim, float* result) {
  const Vec16::F inverse = Vec16::Set1(1.0f / state.sum);
  for (int c = 0; c < head_dim; c += 16) {
    StoreChannels(result, c, head_dim, Vec16::Mul(LoadChannels(out, c, head_dim), inverse));
  }
}

}  // namespace
}  // namespace kvanta::kernels
