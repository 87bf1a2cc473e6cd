// Combination of split results of a softmax, and its normalization; included by isa_<isa>.cc after operands.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// 2^x of a scalar x <= 0.
KVANTA_INLINE float Exp2One(float x) {
  float lanes[16];
  Vec16::F power = Vec16::Set1(x);
  Exp2OfNegative<Vec16, 1>(&power);
  Vec16::Store(lanes, power);
  return lanes[0];
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
