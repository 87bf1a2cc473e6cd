// The attention kernels, written once over the codes of an ISA (codes_<isa>.h) and its lanes; included by
// isa_<isa>.cc after them. A row's result does not depend on the rows it shares a tile with: every sum has one order,
// over channels (QK) or tokens (PV) ascending.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/scales.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"

namespace kvanta::kernels {
namespace {

inline constexpr float kNegativeInfinity = -__builtin_inff();
// Integer codes meet coefficients rounded to 16 bits. 127 * 256, so that both terms of a split fit signed bytes.
inline constexpr float kLargestOperand = 32512;
inline constexpr float kSmallestMax = 1e-30f;  // keeps 32512 / peak finite

KVANTA_INLINE constexpr int64_t RoundUp(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// A vector of a row: 16 channels, or the last 8 of a head_dim that 16 does not divide. Loads and stores by mask, which
// some CPUs are slow at, only there.
KVANTA_INLINE Vec16::F LoadChannels(const float* row, int channel, int head_dim) {
  return channel + 16 <= head_dim ? Vec16::Load(row + channel) : Vec16::LoadTail(row + channel, head_dim - channel);
}

// Blocks of channels that share a scale.
KVANTA_INLINE int ScaleBlocks(const CellView& cell) {
  return cell.block_scales ? cell.head_dim / cell.block : 1;
}

// Coefficients of an integer code: x = integer * unit, integers of magnitude up to 32512 or Decoder::kLargest.
struct Quantizer {
  float unit;
  float inverse;
};
template <class Decoder>
KVANTA_INLINE Quantizer QuantizerOf(Vec16::F max_value) {
  float largest = Vec16::MaxOf(max_value);
  largest = largest > kSmallestMax ? largest : kSmallestMax;
  if constexpr (requires { Decoder::kLargest; }) return {largest / Decoder::kLargest, Decoder::kLargest / largest};
  return {largest / kLargestOperand, kLargestOperand / largest};
}

// Packs x[0, n) as coefficients of a code, rounded to integers where the code is one; n a multiple of 16. Returns the
// integers' sum: below 2^24, exact in f32.
template <class Decoder>
KVANTA_INLINE Vec16::F PackRun(const float* x, int n, float inverse, uint8_t* out) {
  Vec16::F sum = Vec16::Zero();
  for (int i = 0; i < n; i += 16) {
    Vec16::F value = Vec16::Load(x + i);
    if (Decoder::kInteger) value = Vec16::Round(Vec16::Mul(value, Vec16::Set1(inverse)));
    if (Decoder::kInteger) sum = Vec16::Add(sum, value);
    Decoder::Pack(value, out + i * Decoder::kOperandBytes);
  }
  return sum;
}

// What a dot with these coefficients starts from, to take the codes' offset off again.
KVANTA_INLINE int32_t Bias(float total, int offset) {
  if (offset == 0) return 0;
  // NaN coefficients have no bias; their result is NaN by the factor they are multiplied with.
  return total == total ? -offset * static_cast<int32_t>(total) : 0;
}

// ---- queries: [head_dim coefficients, padded][int32 bias per block][f32 sum per block], each 64-byte aligned

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
  Vec16::F max_value = Vec16::Zero();
  for (int i = 0; i < head_dim; i += 16) {
    const Vec16::F part = LoadChannels(query, i, head_dim);
    sum = Vec16::Add(sum, part);
    max_value = Vec16::Max(max_value, Vec16::Abs(part));
    Vec16::Store(x + i, part);
  }
  const Quantizer quantizer = QuantizerOf<Decoder>(max_value);
  int32_t* bias = reinterpret_cast<int32_t*>(out + BiasOffset<Decoder>(head_dim));
  float* totals = reinterpret_cast<float*>(bias + kMaxBlocks);
  const int width = block > 0 ? block : static_cast<int>(RoundUp(head_dim, 16));
  for (int first = 0, b = 0; first < head_dim; first += width, ++b) {
    totals[b] = Vec16::Sum(PackRun<Decoder>(x + first, width, quantizer.inverse, out + first * Decoder::kOperandBytes));
    bias[b] = Bias(totals[b], offset);
  }
  // NaN and infinities must not become numbers.
  return Decoder::kInteger ? quantizer.unit + 0 * Vec16::Sum(sum) : 1.0f;
}

template <class Decoder>
float PrepareQuery(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareFor<Decoder>(query, head_dim, block, Decoder::kOffset, out);
}

// ---- QK

// What a prepared query's coefficients sum up to, block by block.
template <class Decoder>
KVANTA_INLINE const float* Totals(const KeyPass& pass, int row) {
  const uint8_t* query = pass.query + row * pass.query_stride;
  return reinterpret_cast<const float*>(query + BiasOffset<Decoder>(pass.cell.head_dim)) + kMaxBlocks;
}

// Rows [row, row + kRows) on kGroups groups of 16 tokens from `group` on, whose codes are `lines`.
template <class Decoder, int kGroups, int kRows>
KVANTA_INLINE void ScoreTile(const KeyPass& pass, const uint8_t* lines, int group, int row, Prefetcher& prefetch) {
  const CellView& cell = pass.cell;
  const int channels = cell.block_scales ? cell.block : cell.head_dim;  // of a block
  const int64_t bias_offset = BiasOffset<Decoder>(cell.head_dim);
  const int64_t group_bytes = int64_t{cell.head_dim} * (32 / Decoder::kSub) * 2;
  Vec16::F sums[kRows * kGroups];
  for (int i = 0; i < kRows * kGroups; ++i) sums[i] = Vec16::Zero();
  for (int b = 0; b * channels < cell.head_dim; ++b) {
    const uint8_t* operands[kRows];
    int32_t bias[kRows];
    Vec16::F dots[kRows * kGroups];
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* query = pass.query + (row + r) * pass.query_stride;
      operands[r] = query + int64_t{b} * channels * Decoder::kOperandBytes;
      bias[r] = reinterpret_cast<const int32_t*>(query + bias_offset)[b];
    }
    const StridedLines run{lines + int64_t{b} * channels / Decoder::kSub * 64, 64, channels / Decoder::kSub,
                           group_bytes, 16 * kGroups};
    Decoder::template Dot<kGroups, kRows, false>(run, operands, bias, dots, prefetch);
    if (!cell.block_scales) {
      for (int i = 0; i < kRows * kGroups; ++i) sums[i] = dots[i];
      break;
    }
    for (int g = 0; g < kGroups; ++g) {
      const Vec16::F scale = LoadScales(cell.block_scales, b * cell.page_tokens + (group + g) * 16);
      for (int i = g; i < kRows * kGroups; i += kGroups) sums[i] = Vec16::Fma(dots[i], scale, sums[i]);
    }
  }
  for (int g = 0; cell.token_scales && g < kGroups; ++g) {
    const Vec16::F scale = LoadScales(cell.token_scales, (group + g) * 16);
    for (int i = g; i < kRows * kGroups; i += kGroups) sums[i] = Vec16::Mul(sums[i], scale);
  }
  for (int i = 0; i < kRows * kGroups; ++i) {
    const int r = row + i / kGroups;
    Vec16::Store(pass.scores + r * kMaxPageTokens + (group + i % kGroups) * 16,
                 Vec16::Mul(sums[i], Vec16::Set1(pass.row_scale[r])));
  }
}

template <class Decoder, int kGroups>
KVANTA_INLINE void ScoreGroups(const KeyPass& pass, const uint8_t* lines, int group, Prefetcher& prefetch) {
  int row = 0;
  for (; row + kQueryTile <= pass.rows; row += kQueryTile) {
    ScoreTile<Decoder, kGroups, kQueryTile>(pass, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 3) {
    if (pass.rows - row == 3) ScoreTile<Decoder, kGroups, 3>(pass, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 2) {
    if (pass.rows - row == 2) ScoreTile<Decoder, kGroups, 2>(pass, lines, group, row, prefetch);
  }
  if (pass.rows - row == 1) ScoreTile<Decoder, kGroups, 1>(pass, lines, group, row, prefetch);
}

// Runs that a code's dot takes at a time.
template <class Decoder>
KVANTA_INLINE constexpr int RunsUnroll() {
  if constexpr (requires { Decoder::kRuns; }) return Decoder::kRuns;
  return kRunsUnroll;
}

// Tiles of query rows that a pass is made of.
KVANTA_INLINE constexpr int RowTiles(int rows) {
  return (rows + kQueryTile - 1) / kQueryTile;
}

// Steps of the prefetcher in a pass over keys, of which `beside` groups are scored at a time, a step for `channels`.
KVANTA_INLINE constexpr int ScoreSteps(const KeyPass& pass, int unrolled, int channels) {
  return (pass.groups + unrolled - 1) / unrolled * RowTiles(pass.rows) * (pass.cell.head_dim / channels);
}

template <class Decoder>
void Score(const KeyPass& pass) {
  constexpr int kGroups = RunsUnroll<Decoder>();
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, kGroups, Decoder::kSub * kLinesOfStep)};
  const int64_t group_bytes = int64_t{pass.cell.head_dim} * (32 / Decoder::kSub) * 2;
  int group = 0;
  for (; group + kGroups <= pass.groups; group += kGroups) {
    ScoreGroups<Decoder, kGroups>(pass, pass.cell.codes + group * group_bytes, group, prefetch);
  }
  if (group < pass.groups) ScoreGroups<Decoder, 1>(pass, pass.cell.codes + group * group_bytes, group, prefetch);
}

// ---- PV

// p times the scales of the side, per row and block: [blocks][page_tokens] coefficients.
struct ScaledProbs {
  const uint8_t* rows;
  int64_t row_stride;
  int64_t block_stride;
  int64_t tile_stride;   // of 64 slots, or of what a tile holds of them
  const uint8_t* signs;  // of the scales, of one row; narrow codes only
  float unit[kPassRows][kMaxBlocks];
  int32_t bias[kPassRows][kMaxBlocks];
  float zero[kPassRows][kMaxBlocks];  // sum of p times the zeros

  KVANTA_INLINE void Place(const uint8_t* first, int64_t of_row, int64_t of_block, int64_t of_tile) {
    rows = first;
    row_stride = of_row;
    block_stride = of_block;
    tile_stride = of_tile;
  }
  // Of a slot whose coefficient is a byte.
  KVANTA_INLINE int64_t Offset(int row, int block, int slot) const {
    return row * row_stride + block * block_stride + slot / 64 * tile_stride + slot % 64;
  }
};

// For all but narrow codes, which are met by attention_narrow_values.h; these have no zeros, and scales that are not
// negative.
template <class Decoder>
KVANTA_INLINE void ScaleProbs(const ValuePass& pass, ScaledProbs& probs) {
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell);
  const int first = pass.begin / 16 * 16, count = static_cast<int>(RoundUp(pass.end, 16)) - first;
  const ScaleSection& scales = cell.block_scales ? cell.block_scales : cell.token_scales;
  const int64_t block_bytes = int64_t{cell.page_tokens} * Decoder::kOperandBytes;
  probs.Place(pass.workspace, kWeightBytes, block_bytes, int64_t{64} * Decoder::kOperandBytes);
  alignas(64) float w[kPassRows][kMaxPageTokens];  // of integers
  alignas(64) float scale[kMaxPageTokens];         // of the block, for all rows
  for (int b = 0; b < blocks; ++b) {
    for (int t = first; t < first + count; t += 16) {
      Vec16::F x = Vec16::Mul(LoadScales(scales, b * cell.page_tokens + t), Vec16::Set1(pass.scale));
      // Scales of unused slots may be anything.
      if (t < pass.begin || pass.end < t + 16) x = KeepOr(x, 0.0f, pass.begin - t, pass.end - t);
      Vec16::Store(scale + t, x);
    }
    Quantizer quantizers[kPassRows];
    for (int row = 0; row < pass.rows; ++row) {
      const float* p = pass.p + row * kMaxPageTokens;
      uint8_t* out = pass.workspace + row * kWeightBytes + b * probs.block_stride;
      Vec16::F max_value = Vec16::Zero();
      for (int t = first; t < first + count; t += 16) {
        const Vec16::F x = Vec16::Mul(Vec16::Load(p + t), Vec16::Load(scale + t));
        if constexpr (Decoder::kInteger) {
          max_value = Vec16::Max(max_value, x);
          Vec16::Store(w[row] + t, x);
        } else {
          Decoder::Pack(x, out + t * Decoder::kOperandBytes);
        }
      }
      if constexpr (Decoder::kInteger) quantizers[row] = QuantizerOf<Decoder>(max_value);
      probs.zero[row][b] = 0;
      probs.bias[row][b] = 0;
    }
    for (int row = 0; Decoder::kInteger && row < pass.rows; ++row) {  // apart, so that the rows' reductions overlap
      uint8_t* out = pass.workspace + row * kWeightBytes + b * probs.block_stride + first * Decoder::kOperandBytes;
      const Vec16::F total = PackRun<Decoder>(w[row] + first, count, quantizers[row].inverse, out);
      probs.unit[row][b] = quantizers[row].unit;
      probs.bias[row][b] = Bias(Vec16::Sum(total), Decoder::kOffset);
    }
  }
}

// A run of whole units of 4 / element bytes tokens.
struct TokenRange {
  const uint8_t* lines;  // of the first unit
  int first;             // its first token
  int units;
  bool rescale;  // the first segment of a pass rescales what `out` holds
};

// Channels that one call of a code's dot goes over.
template <class Decoder>
KVANTA_INLINE constexpr int ColumnsOf() {
  if constexpr (requires { Decoder::kChannels; }) return Decoder::kChannels;
  return 16 * RunsUnroll<Decoder>();  // which share a block: blocks of these codes are not smaller
}

// Whether sums start from the bias of the weights.
template <class Decoder>
KVANTA_INLINE constexpr bool StartsSums() {
  if constexpr (requires { Decoder::kStarts; }) return Decoder::kStarts;
  return true;
}

// Such columns that a call takes, where there are as many.
template <class Decoder>
KVANTA_INLINE constexpr int ColumnsUnroll() {
  if constexpr (requires { Decoder::kUnroll; }) return Decoder::kUnroll;
  return 1;
}

// kCount columns of ColumnsOf<Decoder>() channels; kTail: one that has fewer left.
template <class Decoder, int kRows, bool kTail, int kCount>
KVANTA_INLINE void AddColumns(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range, int column,
                              int row, Prefetcher& prefetch) {
  constexpr int kPerColumn = ColumnsOf<Decoder>() / 16, kVectors = kCount * kPerColumn;
  int blocks[kVectors];
  const uint8_t* operands[kVectors][kRows];
  for (int v = 0; v < kVectors; ++v) {
    const int channel = !kTail || column + 16 * v < pass.cell.head_dim ? column + 16 * v : column;
    blocks[v] = pass.cell.block_scales ? channel / pass.cell.block : 0;
    const int64_t of_block = blocks[v] * probs.block_stride + range.first * Decoder::kOperandBytes;
    for (int r = 0; r < kRows; ++r) operands[v][r] = probs.rows + (row + r) * probs.row_stride + of_block;
  }
  Vec16::F dots[kRows * kVectors];
  int32_t bias[kCount][kRows] = {};
  for (int i = 0; StartsSums<Decoder>() && i < kCount * kRows; ++i) {
    bias[i / kRows][i % kRows] = probs.bias[row + i % kRows][blocks[i / kRows * kPerColumn]];
  }
  if constexpr (requires { Decoder::kBits; }) {
    const uint8_t* signs[kCount];
    for (int c = 0; c < kCount; ++c) {
      signs[c] = probs.signs + blocks[c * kPerColumn] * probs.block_stride + range.first;
    }
    Decoder::template DotValues<kRows, kTail, kCount>(range.lines, pass.cell.head_dim, column, range.units, operands,
                                                      signs, bias, dots, prefetch);
  } else {
    const StridedLines run{range.lines + int64_t{column} * 4, int64_t{pass.cell.head_dim} * 4, range.units, 64,
                           pass.cell.head_dim - column};
    Decoder::template Dot<kVectors, kRows, kTail>(run, operands[0], bias[0], dots, prefetch);
  }
  for (int r = 0; r < kRows; ++r) {
    const Vec16::F rescale = Vec16::Set1(range.rescale ? pass.rescale[row + r] : 1.0f);
    for (int v = 0; v < kVectors; ++v) {
      const Vec16::F unit = Vec16::Set1(probs.unit[row + r][blocks[v]]);
      const Vec16::F zero = Vec16::Set1(probs.zero[row + r][blocks[v]]);
      float* out = pass.out + (row + r) * pass.out_stride + column + 16 * v;
      const Vec16::F dot = dots[r * kVectors + v];
      const Vec16::F sum = Decoder::kInteger ? Vec16::Fma(dot, unit, zero) : dot;
      const int left = pass.cell.head_dim - column - 16 * v;
      if (!kTail || left >= 16) {
        Vec16::Store(out, Vec16::Fma(Vec16::Load(out), rescale, sum));
      } else if (left > 0) {
        Vec16::StoreTail(out, Vec16::Fma(Vec16::LoadTail(out, left), rescale, sum), left);
      }
    }
  }
}

template <class Decoder>
__attribute__((noinline)) void AddTailColumns(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range,
                                              int column, int row, Prefetcher& prefetch) {
  AddColumns<Decoder, 1, true, 1>(pass, probs, range, column, row, prefetch);
}

template <class Decoder, int kRows>
KVANTA_INLINE void AddTile(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range, int row,
                           Prefetcher& prefetch) {
  constexpr int kColumns = ColumnsOf<Decoder>(), kUnroll = ColumnsUnroll<Decoder>();
  int column = 0;
  for (; kUnroll > 1 && column + kUnroll * kColumns <= pass.cell.head_dim; column += kUnroll * kColumns) {
    AddColumns<Decoder, kRows, false, kUnroll>(pass, probs, range, column, row, prefetch);
  }
  for (; column + kColumns <= pass.cell.head_dim; column += kColumns) {
    AddColumns<Decoder, kRows, false, 1>(pass, probs, range, column, row, prefetch);
  }
  // Few heads have a tail: one instance, row by row.
  for (int r = 0; column < pass.cell.head_dim && r < kRows; ++r) {
    AddTailColumns<Decoder>(pass, probs, range, column, row + r, prefetch);
  }
}

template <class Decoder>
KVANTA_INLINE void AddTokenRange(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range,
                                 Prefetcher& prefetch) {
  int row = 0;
  for (; row + kQueryTile <= pass.rows; row += kQueryTile) {
    AddTile<Decoder, kQueryTile>(pass, probs, range, row, prefetch);
  }
  if constexpr (kQueryTile > 3) {
    if (pass.rows - row == 3) AddTile<Decoder, 3>(pass, probs, range, row, prefetch);
  }
  if constexpr (kQueryTile > 2) {
    if (pass.rows - row == 2) AddTile<Decoder, 2>(pass, probs, range, row, prefetch);
  }
  if (pass.rows - row == 1) AddTile<Decoder, 1>(pass, probs, range, row, prefetch);
}

// The unit of `first`, its tokens outside [begin, end) zeroed: unused slots may hold NaN, which no weight of 0 removes.
template <class Decoder>
KVANTA_INLINE void MaskUnit(const uint8_t* lines, int head_dim, int first, int begin, int end, uint8_t* out) {
  uint32_t mask = 0;
  for (int t = 0; t < Decoder::kSub; ++t) {
    const uint32_t element = Decoder::kSub == 1 ? ~0U : (1U << (32 / Decoder::kSub)) - 1U;
    if (first + t >= begin && first + t < end) mask |= element << (t * 32 / Decoder::kSub);
  }
  for (int c = 0; c < head_dim; ++c) {
    uint32_t unit;
    __builtin_memcpy(&unit, lines + 4 * c, 4);
    unit &= mask;
    __builtin_memcpy(out + 4 * c, &unit, 4);
  }
}

// Steps of the prefetcher in a pass over the values of `units` units.
template <class Decoder>
KVANTA_INLINE int AddSteps(const ValuePass& pass, int units) {
  constexpr int kChannels = ColumnsOf<Decoder>() * ColumnsUnroll<Decoder>();
  return (pass.cell.head_dim + kChannels - 1) / kChannels * RowTiles(pass.rows) * units;
}

template <class Decoder>
void Accumulate(const ValuePass& pass) {
  Prefetcher prefetch{pass.prefetch, AddSteps<Decoder>(pass, (pass.end - pass.begin) / (Decoder::kSub * kLinesOfStep))};
  ScaledProbs probs;
  ScaleProbs<Decoder>(pass, probs);
  const int64_t unit_bytes = int64_t{pass.cell.head_dim} * 4;
  int begin = pass.begin / Decoder::kSub * Decoder::kSub;
  int end = static_cast<int>(RoundUp(pass.end, Decoder::kSub));
  bool rescale = true;
  const auto add = [&](const uint8_t* lines, int first, int last) {
    AddTokenRange<Decoder>(pass, probs, {lines, first, (last - first) / Decoder::kSub, rescale}, prefetch);
    rescale = false;
  };
  const auto lines_of = [&](int token) { return pass.cell.codes + token / Decoder::kSub * unit_bytes; };
  if (Decoder::kInteger || (begin == pass.begin && end == pass.end)) {
    add(lines_of(begin), begin, end);
  } else {
    alignas(64) uint8_t masked[4 * kMaxHeadDim];
    const auto add_masked = [&](int first) {
      MaskUnit<Decoder>(lines_of(first), pass.cell.head_dim, first, pass.begin, pass.end, masked);
      add(masked, first, first + Decoder::kSub);
    };
    if (begin != pass.begin) {
      add_masked(begin);
      begin += Decoder::kSub;
    }
    const int whole = pass.end / Decoder::kSub * Decoder::kSub;
    if (begin < whole) add(lines_of(begin), begin, whole);
    if (whole >= begin && whole != end) add_masked(whole);
  }
}

}  // namespace
}  // namespace kvanta::kernels
