// Kernels of Gated DeltaNet, written once over the Vec16 of the including ISA unit.
#pragma once

#include "kernels/cpu/row_kernels.h"
#include "kernels/linear_attention/cpu/table.h"

namespace kvanta::kernels {
namespace {

void L2NormRow(float* x, float scale, float eps, int64_t n) noexcept {
  Vec16::F squares = Vec16::Zero();
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec16::F v = LoadVec16(x + i, lanes);
        squares = Vec16::Fma(v, v, squares);
      });
  const Vec16::F factor = Vec16::Div(Vec16::Set1(scale), Vec16::Sqrt(Vec16::Set1(Vec16::Sum(squares) + eps)));
  ForLanes(
      n, [&](int64_t i, int lanes)
             __attribute__((always_inline)) { StoreVec16(x + i, Vec16::Mul(LoadVec16(x + i, lanes), factor), lanes); });
}

// log(1 + e^y) = max(y, 0) + log(1 + t) where t = e^-|y|, and log(1 + t) = 2 atanh(s) where s = t / (2 + t) is at most
// 1/3: eight terms of its series are exact to 1e-8.
void ChannelDecay(const float* x, const float* bias, float rate, int64_t n, float* out) noexcept {
  constexpr int kTerms = 8;
  const Vec16::F zero = Vec16::Zero(), two = Vec16::Set1(2.0f), factor = Vec16::Set1(rate);
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec16::F y = Vec16::Add(LoadVec16(x + i, lanes), LoadVec16(bias + i, lanes));
        const Vec16::F negated = Vec16::Sub(zero, y);
        const Vec16::F t = Vec16::Exp(Vec16::Min(negated, y));
        const Vec16::F s = Vec16::Div(t, Vec16::Add(t, two)), square = Vec16::Mul(s, s);
        Vec16::F series = Vec16::Set1(1.0f / (2 * kTerms - 1));
#pragma GCC unroll 8
        for (int term = kTerms - 1; term > 0; --term) {
          series = Vec16::Fma(series, square, Vec16::Set1(1.0f / static_cast<float>(2 * term - 1)));
        }
        const Vec16::F softplus = Vec16::Fma(Vec16::Mul(two, s), series, Vec16::Max(zero, y));
        StoreVec16(out + i, Vec16::Exp(Vec16::Mul(factor, softplus)), lanes);
      });
}

void BoundedChannelDecay(const float* x, const float* bias, float rate, float bound, int64_t n, float* out) noexcept {
  const Vec16::F one = Vec16::Set1(1.0f), factor = Vec16::Set1(rate), lowest = Vec16::Set1(bound);
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec16::F y = Vec16::Add(LoadVec16(x + i, lanes), LoadVec16(bias + i, lanes));
        const Vec16::F e = Vec16::Exp(Vec16::Mul(factor, y));
        StoreVec16(out + i, Vec16::Exp(Vec16::Div(lowest, Vec16::Add(one, e))), lanes);
      });
}

// Two vectors of columns; sums over k in two chains, of its even and of its odd elements. kOfChannels: each row of the
// state has a decay; else all have one.
template <bool kOfChannels>
__attribute__((always_inline)) inline void DeltaRuleOf(const DeltaTokens& tokens, float* state) noexcept {
  constexpr int kLanes = Vec16::kLanes;
  static_assert(kDeltaColumns == 2 * kLanes);
  const int first = tokens.columns < kLanes ? tokens.columns : kLanes, second = tokens.columns - first;
  const auto load = [](const float* p, int n) __attribute__((always_inline)) {
    return n == 0 ? Vec16::Zero() : LoadVec16(p, n);
  };
  for (int token = 0; token < tokens.tokens; ++token) {
    const float* k = tokens.k + token * tokens.qk_stride;
    const float* q = tokens.q + token * tokens.qk_stride;
    const float* v = tokens.v + token * tokens.v_stride;
    const float* decays = tokens.decay + token * tokens.factor_stride;
    const Vec16::F decay = Vec16::Set1(decays[0]);
    const Vec16::F beta = Vec16::Set1(tokens.beta[token * tokens.factor_stride]);
    Vec16::F sums[2][2] = {{Vec16::Zero(), Vec16::Zero()}, {Vec16::Zero(), Vec16::Zero()}};  // [chain][vector]
    for (int i = 0; i < tokens.k_dim; i += 2) {
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain) {
        const float* row = state + (i + chain) * kDeltaColumns;
        const Vec16::F key = Vec16::Set1(kOfChannels ? k[i + chain] * decays[i + chain] : k[i + chain]);
        sums[chain][0] = Vec16::Fma(Vec16::Load(row), key, sums[chain][0]);
        sums[chain][1] = Vec16::Fma(Vec16::Load(row + kLanes), key, sums[chain][1]);
      }
    }
    Vec16::F delta[2];
    const Vec16::F values[2] = {load(v, first), load(v + kLanes, second)};
#pragma GCC unroll 2
    for (int vector = 0; vector < 2; ++vector) {
      Vec16::F known = Vec16::Add(sums[0][vector], sums[1][vector]);
      if constexpr (!kOfChannels) known = Vec16::Mul(decay, known);
      delta[vector] = Vec16::Mul(Vec16::Sub(values[vector], known), beta);
      sums[0][vector] = sums[1][vector] = Vec16::Zero();
    }
    for (int i = 0; i < tokens.k_dim; i += 2) {
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain) {
        float* row = state + (i + chain) * kDeltaColumns;
        const Vec16::F key = Vec16::Set1(k[i + chain]), query = Vec16::Set1(q[i + chain]);
        const Vec16::F factor = kOfChannels ? Vec16::Set1(decays[i + chain]) : decay;
#pragma GCC unroll 2
        for (int vector = 0; vector < 2; ++vector) {
          const Vec16::F kept = Vec16::Mul(Vec16::Load(row + vector * kLanes), factor);
          const Vec16::F next = Vec16::Fma(key, delta[vector], kept);
          Vec16::Store(row + vector * kLanes, next);
          sums[chain][vector] = Vec16::Fma(next, query, sums[chain][vector]);
        }
      }
    }
    float* out = tokens.out + token * tokens.out_stride;
    StoreVec16(out, Vec16::Add(sums[0][0], sums[1][0]), first);
    if (second > 0) StoreVec16(out + kLanes, Vec16::Add(sums[0][1], sums[1][1]), second);
  }
}

void DeltaRule(const DeltaTokens& tokens, float* state) noexcept {
  DeltaRuleOf<false>(tokens, state);
}

void ChannelDeltaRule(const DeltaTokens& tokens, float* state) noexcept {
  DeltaRuleOf<true>(tokens, state);
}

constexpr GatedDeltaKernels kGatedDeltaKernels{.l2_norm = L2NormRow,
                                               .channel_decay = ChannelDecay,
                                               .bounded_channel_decay = BoundedChannelDecay,
                                               .delta_rule = DeltaRule,
                                               .channel_delta_rule = ChannelDeltaRule};

}  // namespace
}  // namespace kvanta::kernels
