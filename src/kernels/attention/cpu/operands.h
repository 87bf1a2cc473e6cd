// Operands of integer and float codes, prepared queries, and the tiling of a call; included by isa_<isa>.cc after its
// codes and Vec16.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "kernels/attention/cpu/scales.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// 32 registers of 16 lanes, of which kernels keep a page's vectors in up to 24.
inline constexpr bool kManyRegisters = Vec16::kTileSums >= 24;

inline constexpr float kNegativeInfinity = -__builtin_inff();
// Magnitude of 16-bit operands: 127 * 256, so that both terms of a split into bytes fit signed bytes.
inline constexpr float kMaxOperand16 = 32512;
inline constexpr float kMinAbsMax = 1e-30f;  // keeps 32512 / max finite

// Loads 16 channels of a row, or the last 8 of a head_dim that is not a multiple of 16. Masked loads and stores, slow
// on some CPUs, are used only for those.
KVANTA_INLINE Vec16::F LoadChannels(const float* row, int channel, int head_dim) {
  return channel + 16 <= head_dim ? Vec16::Load(row + channel) : Vec16::LoadTail(row + channel, head_dim - channel);
}

// Number of blocks of channels that have a scale each.
KVANTA_INLINE int ScaleBlocks(const CellView& cell) {
  return cell.block_scales ? cell.head_dim / cell.block : 1;
}

// Operands in units of their own, by a scale per row: integers, for integer codes, and fp16 (fp16_dots_avx512.h).
template <class Decoder>
constexpr bool HasScaledOperands() {
  return Decoder::kInteger || requires {
    Decoder::kMaxOperand;
  };
}
// Value of a code of 1 as a decoder's dots read it.
template <class Decoder>
constexpr float CodeUnit() {
  if constexpr (requires { Decoder::kCodeUnit; }) return Decoder::kCodeUnit;
  return 1.0f;
}

// Quantization of a scaled operand: x = operand * scale, magnitudes up to 32512 or Decoder::kMaxOperand.
struct Quantizer {
  float scale;
  float inverse;
};
template <class Decoder>
constexpr float MaxOperand() {
  if constexpr (requires { Decoder::kMaxOperand; }) return Decoder::kMaxOperand;
  return kMaxOperand16;
}
template <class Decoder>
KVANTA_INLINE Quantizer QuantizerOf(Vec16::F max) {
  float largest = Vec16::MaxOf(max);
  largest = largest > kMinAbsMax ? largest : kMinAbsMax;
  return {largest / MaxOperand<Decoder>(), MaxOperand<Decoder>() / largest};
}

// Reduces `count` maxima: largest[i] is the maximum lane of maxima[i], at least kMinAbsMax; inverse[i] is max_operand
// divided by it. All have room for a multiple of 4. By vectors of four: loads match the stores of MaximaOf(), which
// avoids store-forwarding stalls.
KVANTA_INLINE void ReduceMaxima(Vec16::F* maxima, int count, float max_operand, float* largest, float* inverse) {
  using Four = float __attribute__((vector_size(16)));
  const Four min = Four{} + kMinAbsMax, operand = Four{} + max_operand;
  for (int i = count; i % 4 != 0; ++i) maxima[i] = Vec16::Zero();
  for (int first = 0; first < count; first += 4) {
    float maxima_of_four[4];
    Vec16::MaximaOf(maxima + first, maxima_of_four);
    Four four;
    __builtin_memcpy(&four, maxima_of_four, sizeof four);
    four = four > min ? four : min;
    const Four inverses = operand / four;
    __builtin_memcpy(largest + first, &four, sizeof four);
    __builtin_memcpy(inverse + first, &inverses, sizeof inverses);
  }
}

// Packs x[0, n) as operands of a Decoder, rounded to integers for integer codes; n is a multiple of 16. Returns the sum
// of integers: below 2^24, exact in f32.
template <class Decoder>
KVANTA_INLINE Vec16::F PackOperands(const float* x, int n, float inverse, uint8_t* out) {
  Vec16::F sum = Vec16::Zero();
  for (int i = 0; i < n; i += 16) {
    Vec16::F value = Vec16::Load(x + i);
    if (HasScaledOperands<Decoder>()) value = Vec16::Mul(value, Vec16::Set1(inverse));
    if (Decoder::kInteger) {
      value = Vec16::Round(value);
      sum = Vec16::Add(sum, value);
    }
    Decoder::Pack(value, out + i * Decoder::kOperandBytes);
  }
  return sum;
}

// Initial value of a dot, which subtracts the codes' offset times the sum of the operands.
KVANTA_INLINE int32_t Bias(float total, int offset) {
  if (offset == 0) return 0;
  // NaN operands have no bias; their result is NaN through the row factor.
  return total == total ? -offset * static_cast<int32_t>(total) : 0;
}

// Prepared queries are [head_dim operands, padded][int32 bias per block][f32 sum per block], each 64-byte aligned.

constexpr int kMaxBlocks = kMaxHeadDim / 16;

template <class Decoder>
KVANTA_INLINE int64_t BiasOffset(int head_dim) {
  return RoundUp(RoundUp(head_dim, 16) * Decoder::kOperandBytes, 64);
}

template <class Decoder>
int64_t QueryBytes(int head_dim) {
  return BiasOffset<Decoder>(head_dim) + 2 * 4 * kMaxBlocks;
}

template <class Decoder>
KVANTA_INLINE float PrepareFor(const float* query, int head_dim, int block, int offset, uint8_t* out) {
  alignas(64) float x[kMaxHeadDim];
  Vec16::F sum = Vec16::Zero();
  Vec16::F max = Vec16::Zero();
  for (int i = 0; i < head_dim; i += 16) {
    const Vec16::F part = LoadChannels(query, i, head_dim);
    sum = Vec16::Add(sum, part);
    max = Vec16::Max(max, Vec16::Abs(part));
    Vec16::Store(x + i, part);
  }
  const Quantizer quantizer = QuantizerOf<Decoder>(max);
  int32_t* bias = reinterpret_cast<int32_t*>(out + BiasOffset<Decoder>(head_dim));
  float* query_sums = reinterpret_cast<float*>(bias + kMaxBlocks);
  const int width = block > 0 ? block : static_cast<int>(RoundUp(head_dim, 16));
  for (int first = 0, b = 0; first < head_dim; first += width, ++b) {
    query_sums[b] =
        Vec16::Sum(PackOperands<Decoder>(x + first, width, quantizer.inverse, out + first * Decoder::kOperandBytes));
    bias[b] = Bias(query_sums[b], offset);
  }
  // NaN and infinities propagate.
  return HasScaledOperands<Decoder>() ? quantizer.scale * CodeUnit<Decoder>() + 0 * Vec16::Sum(sum) : 1.0f;
}

template <class Decoder>
float PrepareQuery(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareFor<Decoder>(query, head_dim, block, Decoder::kOffset, out);
}

// Groups of 16 lanes that one Dot() computes.
template <class Decoder>
KVANTA_INLINE constexpr int DotUnroll() {
  if constexpr (requires { Decoder::kDotUnroll; }) return Decoder::kDotUnroll;
  return kGroupsUnroll;
}

// Rows of a larger tile, which shares loads and decoding among them, where element types have one; else 0.
template <class Decoder>
KVANTA_INLINE constexpr int ManyRows() {
  if constexpr (requires { Decoder::kManyRows; }) return Decoder::kManyRows;
  return 0;
}

// Number of query tiles of a call without larger tiles.
KVANTA_INLINE constexpr int QueryTiles(int rows) {
  return (rows + kQueryTile - 1) / kQueryTile;
}

// Number of tiles of a call, larger ones included.
template <class Decoder>
KVANTA_INLINE constexpr int RowTiles(int rows) {
  if constexpr (constexpr int kRows = ManyRows<Decoder>(); kRows != 0) return rows / kRows + QueryTiles(rows % kRows);
  return QueryTiles(rows);
}

// A number of rows as a type.
template <int kRows>
struct RowCount {};

// Calls f(RowCount<rows of a tile>, its first row) for each tile of a call, the larger ones first.
template <class Decoder, class F>
KVANTA_INLINE void ForRowTiles(int rows, F f) {
  int row = 0;
  if constexpr (constexpr int kRows = ManyRows<Decoder>(); kRows != 0) {
    for (; row + kRows <= rows; row += kRows) f(RowCount<kRows>{}, row);
  }
  for (; row + kQueryTile <= rows; row += kQueryTile) f(RowCount<kQueryTile>{}, row);
  if constexpr (kQueryTile > 3) {
    if (rows - row == 3) f(RowCount<3>{}, row);
  }
  if constexpr (kQueryTile > 2) {
    if (rows - row == 2) f(RowCount<2>{}, row);
  }
  if (rows - row == 1) f(RowCount<1>{}, row);
}

}  // namespace
}  // namespace kvanta::kernels
