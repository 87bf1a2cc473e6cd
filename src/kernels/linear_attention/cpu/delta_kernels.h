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

// Two vectors of columns; sums over k in two chains, of its even and of its odd elements.
void DeltaRule(const DeltaTokens& tokens, float* state) noexcept {
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
    const Vec16::F decay = Vec16::Set1(tokens.decay[token * tokens.factor_stride]);
    const Vec16::F beta = Vec16::Set1(tokens.beta[token * tokens.factor_stride]);
    Vec16::F sums[2][2] = {{Vec16::Zero(), Vec16::Zero()}, {Vec16::Zero(), Vec16::Zero()}};  // [chain][vector]
    for (int i = 0; i < tokens.k_dim; i += 2) {
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain) {
        const float* row = state + (i + chain) * kDeltaColumns;
        const Vec16::F key = Vec16::Set1(k[i + chain]);
        sums[chain][0] = Vec16::Fma(Vec16::Load(row), key, sums[chain][0]);
        sums[chain][1] = Vec16::Fma(Vec16::Load(row + kLanes), key, sums[chain][1]);
      }
    }
    Vec16::F delta[2];
    const Vec16::F values[2] = {load(v, first), load(v + kLanes, second)};
#pragma GCC unroll 2
    for (int vector = 0; vector < 2; ++vector) {
      const Vec16::F known = Vec16::Mul(decay, Vec16::Add(sums[0][vector], sums[1][vector]));
      delta[vector] = Vec16::Mul(Vec16::Sub(values[vector], known), beta);
      sums[0][vector] = sums[1][vector] = Vec16::Zero();
    }
    for (int i = 0; i < tokens.k_dim; i += 2) {
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain) {
        float* row = state + (i + chain) * kDeltaColumns;
        const Vec16::F key = Vec16::Set1(k[i + chain]), query = Vec16::Set1(q[i + chain]);
#pragma GCC unroll 2
        for (int vector = 0; vector < 2; ++vector) {
          const Vec16::F kept = Vec16::Mul(Vec16::Load(row + vector * kLanes), decay);
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

constexpr GatedDeltaKernels kGatedDeltaKernels{.l2_norm = L2NormRow, .delta_rule = DeltaRule};

}  // namespace
}  // namespace kvanta::kernels
