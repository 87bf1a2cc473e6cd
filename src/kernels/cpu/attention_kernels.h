// The attention kernels, written once over the codes of an ISA (codes_<isa>.h) and its lanes; included by
// isa_<isa>.cc after them. A row's result does not depend on the rows it shares a tile with: every sum has one order,
// over channels (QK) or tokens (PV) ascending.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_scales.h"
#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/line_run.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

inline constexpr float kNegativeInfinity = -__builtin_inff();
// Integer codes meet coefficients rounded to 16 bits. 127 * 256, so that both terms of a split fit signed bytes.
inline constexpr float kLargestCoefficient = 32512;
inline constexpr float kSmallestPeak = 1e-30f;  // keeps 32512 / peak finite

KVANTA_INLINE constexpr int64_t RoundUp(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// A vector of a row: 16 channels, or the last 8 of a head_dim that 16 does not divide. Loads and stores by mask, which
// some CPUs are slow at, only there.
KVANTA_INLINE Lanes::F LoadChannels(const float* row, int channel, int head_dim) {
  return channel + 16 <= head_dim ? Lanes::Load(row + channel) : Lanes::LoadTail(row + channel, head_dim - channel);
}

// Blocks of channels that share a scale.
KVANTA_INLINE int ScaleBlocks(const CellView& cell) {
  return cell.block_scales ? cell.head_dim / cell.block : 1;
}

// Coefficients of an integer code: x = integer * unit, integers of magnitude up to 32512 or Code::kLargest.
struct Quantizer {
  float unit;
  float inverse;
};
template <class Code>
KVANTA_INLINE Quantizer QuantizerOf(Lanes::F peak) {
  float largest = Lanes::MaxOf(peak);
  largest = largest > kSmallestPeak ? largest : kSmallestPeak;
  if constexpr (requires { Code::kLargest; }) return {largest / Code::kLargest, Code::kLargest / largest};
  return {largest / kLargestCoefficient, kLargestCoefficient / largest};
}

// Packs x[0, n) as coefficients of a code, rounded to integers where the code is one; n a multiple of 16. Returns the
// integers' sum: below 2^24, exact in f32.
template <class Code>
KVANTA_INLINE Lanes::F PackRun(const float* x, int n, float inverse, uint8_t* out) {
  Lanes::F sum = Lanes::Zero();
  for (int i = 0; i < n; i += 16) {
    Lanes::F value = Lanes::Load(x + i);
    if (Code::kInteger) value = Lanes::Round(Lanes::Mul(value, Lanes::Set1(inverse)));
    if (Code::kInteger) sum = Lanes::Add(sum, value);
    Code::Pack(value, out + i * Code::kCoefficientBytes);
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

template <class Code>
KVANTA_INLINE int64_t BiasOffset(int head_dim) {
  return RoundUp(RoundUp(head_dim, 16) * Code::kCoefficientBytes, 64);
}

template <class Code>
int64_t QueryBytes(int head_dim) {
  return BiasOffset<Code>(head_dim) + 2 * 4 * kMaxBlocks;
}

template <class Code>
KVANTA_INLINE float PrepareFor(const float* query, int head_dim, int block, int offset, uint8_t* out) {
  alignas(64) float x[kMaxHeadDim];
  Lanes::F sum = Lanes::Zero();
  Lanes::F peak = Lanes::Zero();
  for (int i = 0; i < head_dim; i += 16) {
    const Lanes::F part = LoadChannels(query, i, head_dim);
    sum = Lanes::Add(sum, part);
    peak = Lanes::Max(peak, Lanes::Abs(part));
    Lanes::Store(x + i, part);
  }
  const Quantizer quantizer = QuantizerOf<Code>(peak);
  int32_t* bias = reinterpret_cast<int32_t*>(out + BiasOffset<Code>(head_dim));
  float* totals = reinterpret_cast<float*>(bias + kMaxBlocks);
  const int width = block > 0 ? block : static_cast<int>(RoundUp(head_dim, 16));
  for (int first = 0, b = 0; first < head_dim; first += width, ++b) {
    totals[b] = Lanes::Sum(PackRun<Code>(x + first, width, quantizer.inverse, out + first * Code::kCoefficientBytes));
    bias[b] = Bias(totals[b], offset);
  }
  // NaN and infinities must not become numbers.
  return Code::kInteger ? quantizer.unit + 0 * Lanes::Sum(sum) : 1.0f;
}

template <class Code>
float PrepareQuery(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareFor<Code>(query, head_dim, block, Code::kOffset, out);
}

// ---- QK

// What a prepared query's coefficients sum up to, block by block.
template <class Code>
KVANTA_INLINE const float* Totals(const KeyPass& pass, int row) {
  const uint8_t* query = pass.query + row * pass.query_stride;
  return reinterpret_cast<const float*>(query + BiasOffset<Code>(pass.cell.head_dim)) + kMaxBlocks;
}

// Rows [row, row + kRows) on kGroups groups of 16 tokens from `group` on, whose codes are `lines`.
template <class Code, int kGroups, int kRows>
KVANTA_INLINE void ScoreTile(const KeyPass& pass, const uint8_t* lines, int group, int row, Prefetcher& prefetch) {
  const CellView& cell = pass.cell;
  const int channels = cell.block_scales ? cell.block : cell.head_dim;  // of a block
  const int64_t bias_offset = BiasOffset<Code>(cell.head_dim);
  const int64_t group_bytes = int64_t{cell.head_dim} * (32 / Code::kSub) * 2;
  Lanes::F sums[kRows * kGroups];
  for (int i = 0; i < kRows * kGroups; ++i) sums[i] = Lanes::Zero();
  for (int b = 0; b * channels < cell.head_dim; ++b) {
    const uint8_t* coefficients[kRows];
    int32_t bias[kRows];
    Lanes::F dots[kRows * kGroups];
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* query = pass.query + (row + r) * pass.query_stride;
      coefficients[r] = query + int64_t{b} * channels * Code::kCoefficientBytes;
      bias[r] = reinterpret_cast<const int32_t*>(query + bias_offset)[b];
    }
    const LineRun run{lines + int64_t{b} * channels / Code::kSub * 64, 64, channels / Code::kSub, group_bytes,
                      16 * kGroups};
    Code::template Dot<kGroups, kRows, false>(run, coefficients, bias, dots, prefetch);
    if (!cell.block_scales) {
      for (int i = 0; i < kRows * kGroups; ++i) sums[i] = dots[i];
      break;
    }
    for (int g = 0; g < kGroups; ++g) {
      const Lanes::F scale = LoadScales(cell.block_scales, b * cell.page_tokens + (group + g) * 16);
      for (int i = g; i < kRows * kGroups; i += kGroups) sums[i] = Lanes::Fma(dots[i], scale, sums[i]);
    }
  }
  for (int g = 0; cell.token_scales && g < kGroups; ++g) {
    const Lanes::F scale = LoadScales(cell.token_scales, (group + g) * 16);
    for (int i = g; i < kRows * kGroups; i += kGroups) sums[i] = Lanes::Mul(sums[i], scale);
  }
  for (int i = 0; i < kRows * kGroups; ++i) {
    const int r = row + i / kGroups;
    Lanes::Store(pass.scores + r * kMaxPageTokens + (group + i % kGroups) * 16,
                 Lanes::Mul(sums[i], Lanes::Set1(pass.row_scale[r])));
  }
}

template <class Code, int kGroups>
KVANTA_INLINE void ScoreGroups(const KeyPass& pass, const uint8_t* lines, int group, Prefetcher& prefetch) {
  int row = 0;
  for (; row + kQueryTile <= pass.rows; row += kQueryTile) {
    ScoreTile<Code, kGroups, kQueryTile>(pass, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 3) {
    if (pass.rows - row == 3) ScoreTile<Code, kGroups, 3>(pass, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 2) {
    if (pass.rows - row == 2) ScoreTile<Code, kGroups, 2>(pass, lines, group, row, prefetch);
  }
  if (pass.rows - row == 1) ScoreTile<Code, kGroups, 1>(pass, lines, group, row, prefetch);
}

// Runs that a code's dot takes at a time.
template <class Code>
KVANTA_INLINE constexpr int RunsBeside() {
  if constexpr (requires { Code::kRuns; }) return Code::kRuns;
  return kRunsBeside;
}

// Tiles of query rows that a pass is made of.
KVANTA_INLINE constexpr int RowTiles(int rows) {
  return (rows + kQueryTile - 1) / kQueryTile;
}

// Steps of the prefetcher in a pass over keys, of which `beside` groups are scored at a time, a step for `channels`.
KVANTA_INLINE constexpr int ScoreSteps(const KeyPass& pass, int beside, int channels) {
  return (pass.groups + beside - 1) / beside * RowTiles(pass.rows) * (pass.cell.head_dim / channels);
}

template <class Code>
void Score(const KeyPass& pass) {
  constexpr int kGroups = RunsBeside<Code>();
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, kGroups, Code::kSub * kLinesOfStep)};
  const int64_t group_bytes = int64_t{pass.cell.head_dim} * (32 / Code::kSub) * 2;
  int group = 0;
  for (; group + kGroups <= pass.groups; group += kGroups) {
    ScoreGroups<Code, kGroups>(pass, pass.cell.codes + group * group_bytes, group, prefetch);
  }
  if (group < pass.groups) ScoreGroups<Code, 1>(pass, pass.cell.codes + group * group_bytes, group, prefetch);
}

// ---- PV

// p times the scales of the side, per row and block: [blocks][page_tokens] coefficients.
struct Weights {
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
template <class Code>
KVANTA_INLINE void Weigh(const ValuePass& pass, Weights& weights) {
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell);
  const int first = pass.begin / 16 * 16, count = static_cast<int>(RoundUp(pass.end, 16)) - first;
  const ScalePlane& scales = cell.block_scales ? cell.block_scales : cell.token_scales;
  const int64_t block_bytes = int64_t{cell.page_tokens} * Code::kCoefficientBytes;
  weights.Place(pass.room, kWeightBytes, block_bytes, int64_t{64} * Code::kCoefficientBytes);
  alignas(64) float w[kPassRows][kMaxPageTokens];  // of integers
  alignas(64) float scale[kMaxPageTokens];         // of the block, for all rows
  for (int b = 0; b < blocks; ++b) {
    for (int t = first; t < first + count; t += 16) {
      Lanes::F x = Lanes::Mul(LoadScales(scales, b * cell.page_tokens + t), Lanes::Set1(pass.scale));
      // Scales of unused slots may be anything.
      if (t < pass.begin || pass.end < t + 16) x = KeepOr(x, 0.0f, pass.begin - t, pass.end - t);
      Lanes::Store(scale + t, x);
    }
    Quantizer quantizers[kPassRows];
    for (int row = 0; row < pass.rows; ++row) {
      const float* p = pass.p + row * kMaxPageTokens;
      uint8_t* out = pass.room + row * kWeightBytes + b * weights.block_stride;
      Lanes::F peak = Lanes::Zero();
      for (int t = first; t < first + count; t += 16) {
        const Lanes::F x = Lanes::Mul(Lanes::Load(p + t), Lanes::Load(scale + t));
        if constexpr (Code::kInteger) {
          peak = Lanes::Max(peak, x);
          Lanes::Store(w[row] + t, x);
        } else {
          Code::Pack(x, out + t * Code::kCoefficientBytes);
        }
      }
      if constexpr (Code::kInteger) quantizers[row] = QuantizerOf<Code>(peak);
      weights.zero[row][b] = 0;
      weights.bias[row][b] = 0;
    }
    for (int row = 0; Code::kInteger && row < pass.rows; ++row) {  // apart, so that the rows' reductions overlap
      uint8_t* out = pass.room + row * kWeightBytes + b * weights.block_stride + first * Code::kCoefficientBytes;
      const Lanes::F total = PackRun<Code>(w[row] + first, count, quantizers[row].inverse, out);
      weights.unit[row][b] = quantizers[row].unit;
      weights.bias[row][b] = Bias(Lanes::Sum(total), Code::kOffset);
    }
  }
}

// A run of whole units of 4 / element bytes tokens.
struct Segment {
  const uint8_t* lines;  // of the first unit
  int first;             // its first token
  int units;
  bool rescale;  // the first segment of a pass rescales what `out` holds
};

// Channels that one call of a code's dot goes over.
template <class Code>
KVANTA_INLINE constexpr int ColumnsOf() {
  if constexpr (requires { Code::kChannels; }) return Code::kChannels;
  return 16 * RunsBeside<Code>();  // which share a block: blocks of these codes are not smaller
}

// Whether sums start from the bias of the weights.
template <class Code>
KVANTA_INLINE constexpr bool StartsSums() {
  if constexpr (requires { Code::kStarts; }) return Code::kStarts;
  return true;
}

// Such columns that a call takes, where there are as many.
template <class Code>
KVANTA_INLINE constexpr int ColumnsBeside() {
  if constexpr (requires { Code::kBeside; }) return Code::kBeside;
  return 1;
}

// kCount columns of ColumnsOf<Code>() channels; kTail: one that has fewer left.
template <class Code, int kRows, bool kTail, int kCount>
KVANTA_INLINE void AddColumns(const ValuePass& pass, const Weights& weights, const Segment& segment, int column,
                              int row, Prefetcher& prefetch) {
  constexpr int kPerColumn = ColumnsOf<Code>() / 16, kVectors = kCount * kPerColumn;
  int blocks[kVectors];
  const uint8_t* coefficients[kVectors][kRows];
  for (int v = 0; v < kVectors; ++v) {
    const int channel = !kTail || column + 16 * v < pass.cell.head_dim ? column + 16 * v : column;
    blocks[v] = pass.cell.block_scales ? channel / pass.cell.block : 0;
    const int64_t of_block = blocks[v] * weights.block_stride + segment.first * Code::kCoefficientBytes;
    for (int r = 0; r < kRows; ++r) coefficients[v][r] = weights.rows + (row + r) * weights.row_stride + of_block;
  }
  Lanes::F dots[kRows * kVectors];
  int32_t bias[kCount][kRows] = {};
  for (int i = 0; StartsSums<Code>() && i < kCount * kRows; ++i) {
    bias[i / kRows][i % kRows] = weights.bias[row + i % kRows][blocks[i / kRows * kPerColumn]];
  }
  if constexpr (requires { Code::kBits; }) {
    const uint8_t* signs[kCount];
    for (int c = 0; c < kCount; ++c) {
      signs[c] = weights.signs + blocks[c * kPerColumn] * weights.block_stride + segment.first;
    }
    Code::template DotValues<kRows, kTail, kCount>(segment.lines, pass.cell.head_dim, column, segment.units,
                                                   coefficients, signs, bias, dots, prefetch);
  } else {
    const LineRun run{segment.lines + int64_t{column} * 4, int64_t{pass.cell.head_dim} * 4, segment.units, 64,
                      pass.cell.head_dim - column};
    Code::template Dot<kVectors, kRows, kTail>(run, coefficients[0], bias[0], dots, prefetch);
  }
  for (int r = 0; r < kRows; ++r) {
    const Lanes::F rescale = Lanes::Set1(segment.rescale ? pass.rescale[row + r] : 1.0f);
    for (int v = 0; v < kVectors; ++v) {
      const Lanes::F unit = Lanes::Set1(weights.unit[row + r][blocks[v]]);
      const Lanes::F zero = Lanes::Set1(weights.zero[row + r][blocks[v]]);
      float* out = pass.out + (row + r) * pass.out_stride + column + 16 * v;
      const Lanes::F dot = dots[r * kVectors + v];
      const Lanes::F sum = Code::kInteger ? Lanes::Fma(dot, unit, zero) : dot;
      const int left = pass.cell.head_dim - column - 16 * v;
      if (!kTail || left >= 16) {
        Lanes::Store(out, Lanes::Fma(Lanes::Load(out), rescale, sum));
      } else if (left > 0) {
        Lanes::StoreTail(out, Lanes::Fma(Lanes::LoadTail(out, left), rescale, sum), left);
      }
    }
  }
}

template <class Code>
__attribute__((noinline)) void AddTailColumns(const ValuePass& pass, const Weights& weights, const Segment& segment,
                                              int column, int row, Prefetcher& prefetch) {
  AddColumns<Code, 1, true, 1>(pass, weights, segment, column, row, prefetch);
}

template <class Code, int kRows>
KVANTA_INLINE void AddTile(const ValuePass& pass, const Weights& weights, const Segment& segment, int row,
                           Prefetcher& prefetch) {
  constexpr int kColumns = ColumnsOf<Code>(), kBeside = ColumnsBeside<Code>();
  int column = 0;
  for (; kBeside > 1 && column + kBeside * kColumns <= pass.cell.head_dim; column += kBeside * kColumns) {
    AddColumns<Code, kRows, false, kBeside>(pass, weights, segment, column, row, prefetch);
  }
  for (; column + kColumns <= pass.cell.head_dim; column += kColumns) {
    AddColumns<Code, kRows, false, 1>(pass, weights, segment, column, row, prefetch);
  }
  // Few heads have a tail: one instance, row by row.
  for (int r = 0; column < pass.cell.head_dim && r < kRows; ++r) {
    AddTailColumns<Code>(pass, weights, segment, column, row + r, prefetch);
  }
}

template <class Code>
KVANTA_INLINE void AddSegment(const ValuePass& pass, const Weights& weights, const Segment& segment,
                              Prefetcher& prefetch) {
  int row = 0;
  for (; row + kQueryTile <= pass.rows; row += kQueryTile) {
    AddTile<Code, kQueryTile>(pass, weights, segment, row, prefetch);
  }
  if constexpr (kQueryTile > 3) {
    if (pass.rows - row == 3) AddTile<Code, 3>(pass, weights, segment, row, prefetch);
  }
  if constexpr (kQueryTile > 2) {
    if (pass.rows - row == 2) AddTile<Code, 2>(pass, weights, segment, row, prefetch);
  }
  if (pass.rows - row == 1) AddTile<Code, 1>(pass, weights, segment, row, prefetch);
}

// The unit of `first`, its tokens outside [begin, end) zeroed: unused slots may hold NaN, which no weight of 0 removes.
template <class Code>
KVANTA_INLINE void MaskUnit(const uint8_t* lines, int head_dim, int first, int begin, int end, uint8_t* out) {
  uint32_t mask = 0;
  for (int t = 0; t < Code::kSub; ++t) {
    const uint32_t element = Code::kSub == 1 ? ~0U : (1U << (32 / Code::kSub)) - 1U;
    if (first + t >= begin && first + t < end) mask |= element << (t * 32 / Code::kSub);
  }
  for (int c = 0; c < head_dim; ++c) {
    uint32_t unit;
    __builtin_memcpy(&unit, lines + 4 * c, 4);
    unit &= mask;
    __builtin_memcpy(out + 4 * c, &unit, 4);
  }
}

// Steps of the prefetcher in a pass over the values of `units` units.
template <class Code>
KVANTA_INLINE int AddSteps(const ValuePass& pass, int units) {
  constexpr int kChannels = ColumnsOf<Code>() * ColumnsBeside<Code>();
  return (pass.cell.head_dim + kChannels - 1) / kChannels * RowTiles(pass.rows) * units;
}

template <class Code>
void Accumulate(const ValuePass& pass) {
  Prefetcher prefetch{pass.prefetch, AddSteps<Code>(pass, (pass.end - pass.begin) / (Code::kSub * kLinesOfStep))};
  Weights weights;
  Weigh<Code>(pass, weights);
  const int64_t unit_bytes = int64_t{pass.cell.head_dim} * 4;
  int begin = pass.begin / Code::kSub * Code::kSub;
  int end = static_cast<int>(RoundUp(pass.end, Code::kSub));
  bool rescale = true;
  const auto add = [&](const uint8_t* lines, int first, int last) {
    AddSegment<Code>(pass, weights, {lines, first, (last - first) / Code::kSub, rescale}, prefetch);
    rescale = false;
  };
  const auto lines_of = [&](int token) { return pass.cell.codes + token / Code::kSub * unit_bytes; };
  if (Code::kInteger || (begin == pass.begin && end == pass.end)) {
    add(lines_of(begin), begin, end);
  } else {
    alignas(64) uint8_t masked[4 * kMaxHeadDim];
    const auto add_masked = [&](int first) {
      MaskUnit<Code>(lines_of(first), pass.cell.head_dim, first, pass.begin, pass.end, masked);
      add(masked, first, first + Code::kSub);
    };
    if (begin != pass.begin) {
      add_masked(begin);
      begin += Code::kSub;
    }
    const int whole = pass.end / Code::kSub * Code::kSub;
    if (begin < whole) add(lines_of(begin), begin, whole);
    if (whole >= begin && whole != end) add_masked(whole);
  }
}

}  // namespace
}  // namespace kvanta::kernels
