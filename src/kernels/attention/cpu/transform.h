// Hadamard transform of queries and outputs, and the matrix product of +query, over the Vec16 of the including ISA
// unit.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/transform.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Signs of a butterfly of stride `stride`: the upper lane of a pair is subtracted.
struct LaneSigns {
  alignas(64) float signs[16];
};
constexpr LaneSigns MakeLaneSigns(int stride) {
  LaneSigns signs{};
  for (int i = 0; i < 16; ++i) signs.signs[i] = (i & stride) != 0 ? -1.0f : 1.0f;
  return signs;
}

// Butterfly stage of stride kStride within a vector. The product is exact, so this is one addition or subtraction.
template <int kStride>
KVANTA_INLINE Vec16::F StageInside(Vec16::F x) {
  static constexpr LaneSigns kSigns = MakeLaneSigns(kStride);
  return Vec16::Fma(x, Vec16::Load(kSigns.signs), Vec16::Swap<kStride>(x));
}

// Transforms blocks of kVectors vectors, each block in registers.
template <int kVectors>
KVANTA_INLINE void TransformBlocks(const float* x, int head_dim, float* out) {
  const Vec16::F norm = Vec16::Set1(static_cast<float>(1.0 / __builtin_sqrt(16.0 * kVectors)));
  for (int first = 0; first < head_dim; first += 16 * kVectors) {
    Vec16::F v[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      v[i] = StageInside<2>(StageInside<1>(Vec16::Load(x + first + 16 * i)));
      v[i] = StageInside<8>(StageInside<4>(v[i]));
    }
#pragma GCC unroll 4
    for (int stride = 1; stride < kVectors; stride *= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        if ((i & stride) != 0) continue;
        const Vec16::F a = v[i], b = v[i + stride];
        v[i] = Vec16::Add(a, b);
        v[i + stride] = Vec16::Sub(a, b);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) Vec16::Store(out + first + 16 * i, Vec16::Mul(v[i], norm));
  }
}

void TransformRow(const float* x, int head_dim, float* out) {
  switch (formats::HadamardBlock(head_dim)) {
    case 16:
      return TransformBlocks<1>(x, head_dim, out);
    case 32:
      return TransformBlocks<2>(x, head_dim, out);
    case 64:
      return TransformBlocks<4>(x, head_dim, out);
    case 128:
      return TransformBlocks<8>(x, head_dim, out);
    case 256:
      return TransformBlocks<16>(x, head_dim, out);
    default:
      if (out != x) std::memcpy(out, x, sizeof(float) * static_cast<size_t>(head_dim));
      formats::Hadamard(out, head_dim);
  }
}

// Columns [first, first + 16 kVectors) of the product, in registers.
template <int kVectors>
KVANTA_INLINE void MultiplyColumns(const float* x, const float* matrix, int head_dim, int64_t first, float* out) {
  const int64_t stride = formats::MatrixStride(head_dim);
  Vec16::F sums[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) sums[i] = Vec16::Zero();
  for (int64_t j = 0; j < head_dim; ++j) {
    const Vec16::F factor = Vec16::Set1(x[j]);
    const float* row = matrix + j * stride + first;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {  // no Fma: keys are bit-exact on every instruction set
      sums[i] = Vec16::Add(sums[i], Vec16::Mul(Vec16::Load(row + 16 * i), factor));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) Vec16::Store(out + first + 16 * i, sums[i]);
}

void MultiplyRow(const float* x, const float* matrix, int head_dim, float* out) {
  const int64_t stride = formats::MatrixStride(head_dim);
  int64_t first = 0;
  for (; first + 64 <= stride; first += 64) MultiplyColumns<4>(x, matrix, head_dim, first, out);
  for (; first < stride; first += 16) MultiplyColumns<1>(x, matrix, head_dim, first, out);
}

}  // namespace
}  // namespace kvanta::kernels
