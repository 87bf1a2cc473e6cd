// Kernels of Mamba-2, written once over the Vec16 of the including ISA unit.
#pragma once

#include "kernels/cpu/row_kernels.h"
#include "kernels/linear_attention/cpu/table.h"

namespace kvanta::kernels {
namespace {

// kTokens tokens from `first` on, for kVectors vectors of columns from `column` on. A row of the state is read once for
// all of these tokens; each of its elements is the same chain of operations for any number of them. Sums over the state
// in two chains, of its even and of its odd rows.
template <int kTokens, int kVectors>
__attribute__((always_inline)) inline void ScanBlock(const ScanTokens& tokens, int first, int column,
                                                     float* state) noexcept {
  constexpr int kLanes = Vec16::kLanes;
  const auto lanes = [&](int vector) { return tokens.columns - column - vector * kLanes; };
  const float* b = tokens.b + first * tokens.stride;
  const float* c = tokens.c + first * tokens.stride;
  const float* x = tokens.x + first * tokens.stride + column;
  Vec16::F inputs[kTokens][kVectors], decay[kTokens], sums[kTokens][2][kVectors];
#pragma GCC unroll 4
  for (int token = 0; token < kTokens; ++token) {
    decay[token] = Vec16::Set1(tokens.decay[(first + token) * tokens.factor_stride]);
    const Vec16::F dt = Vec16::Set1(tokens.dt[(first + token) * tokens.factor_stride]);
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector) {
      const int n = lanes(vector) < kLanes ? lanes(vector) : kLanes;
      inputs[token][vector] = Vec16::Mul(dt, LoadVec16(x + token * tokens.stride + vector * kLanes, n));
      sums[token][0][vector] = sums[token][1][vector] = Vec16::Zero();
    }
  }
  for (int i = 0; i < tokens.state_size; i += 2) {
#pragma GCC unroll 2
    for (int chain = 0; chain < 2; ++chain) {
      float* row = state + (i + chain) * kDeltaColumns + column;
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; ++vector) {
        Vec16::F h = Vec16::Load(row + vector * kLanes);
#pragma GCC unroll 4
        for (int token = 0; token < kTokens; ++token) {
          const Vec16::F key = Vec16::Set1(b[token * tokens.stride + i + chain]);
          const Vec16::F query = Vec16::Set1(c[token * tokens.stride + i + chain]);
          h = Vec16::Fma(key, inputs[token][vector], Vec16::Mul(h, decay[token]));
          sums[token][chain][vector] = Vec16::Fma(h, query, sums[token][chain][vector]);
        }
        Vec16::Store(row + vector * kLanes, h);
      }
    }
  }
  const Vec16::F d = Vec16::Set1(tokens.d);
#pragma GCC unroll 4
  for (int token = 0; token < kTokens; ++token) {
    float* out = tokens.out + (first + token) * tokens.out_stride + column;
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector) {
      const int n = lanes(vector) < kLanes ? lanes(vector) : kLanes;
      const Vec16::F skipped = LoadVec16(x + token * tokens.stride + vector * kLanes, n);
      StoreVec16(out + vector * kLanes,
                 Vec16::Fma(d, skipped, Vec16::Add(sums[token][0][vector], sums[token][1][vector])), n);
    }
  }
}

void Mamba2Scan(const ScanTokens& tokens, float* state) noexcept {
  constexpr int kLanes = Vec16::kLanes, kTokens = 4;
  static_assert(kDeltaColumns == 2 * kLanes);
  int token = 0;
  for (; token + kTokens <= tokens.tokens; token += kTokens) {
    for (int column = 0; column < tokens.columns; column += kLanes) ScanBlock<kTokens, 1>(tokens, token, column, state);
  }
  for (; token < tokens.tokens; ++token) {
    if (tokens.columns > kLanes) {
      ScanBlock<1, 2>(tokens, token, 0, state);
    } else {
      ScanBlock<1, 1>(tokens, token, 0, state);
    }
  }
}

constexpr Mamba2Kernels kMamba2Kernels{.scan = Mamba2Scan};

}  // namespace
}  // namespace kvanta::kernels
