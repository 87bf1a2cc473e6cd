// PV kernels, written once over the element types (codes_<isa>.h) and Vec16 of an ISA unit. Batch-invariant: sums are
// over tokens in ascending order, whatever the rows of a call.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/scales.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"

namespace kvanta::kernels {
namespace {

// Slots of a page whose scaled probabilities of 8 bits share a quantization scale: fewer for codes of 4 bits and more,
// where the error of the probabilities would matter.
template <formats::ElementType kElementType>
inline constexpr int kSlotsPerScale = formats::CodeBits(kElementType) > 3 ? 64 : kMaxPageTokens;

// End of the slots [begin, ...) of a call's [.., end) that share a scale.
template <formats::ElementType kElementType>
KVANTA_INLINE constexpr int EndOfScale(int begin, int end) {
  const int end_of_scale = (begin / kSlotsPerScale<kElementType> + 1) * kSlotsPerScale<kElementType>;
  return end_of_scale < end ? end_of_scale : end;
}

// p times the scales of V: operands of the tokens of a page, per row and block.
struct ScaledProbs {
  const uint8_t* rows;
  int64_t row_stride;
  int64_t block_stride;
  int64_t tile_stride;                 // per 64 slots, or per AMX tile of slots
  uint8_t block_of[kMaxHeadDim / 16];  // block of the scales of every 16 channels
  const uint8_t* signs = nullptr;  // signs of the scales, the same for all rows: [blocks][page_tokens]; sub-byte codes
  float scale[kPassRows][kMaxBlocks];
  int32_t bias[kPassRows][kMaxBlocks];
  float offset[kPassRows][kMaxBlocks];  // sum of p times the offsets

  // Assigns channels to the blocks of scales of a cell.
  KVANTA_INLINE void SetBlocks(const CellView& cell) {
    const int block = cell.block_scales ? cell.block : cell.head_dim;
    for (int c = 0, b = 0, end = block; c < cell.head_dim; c += 16) {
      if (c >= end) ++b, end += block;
      block_of[c / 16] = static_cast<uint8_t>(b);
    }
  }
  KVANTA_INLINE void Place(const uint8_t* first, int64_t row_bytes, int64_t block_bytes, int64_t tile_bytes) {
    rows = first;
    row_stride = row_bytes;
    block_stride = block_bytes;
    tile_stride = tile_bytes;
  }
  // Position of the operand of a slot, where operands are bytes.
  KVANTA_INLINE int64_t ByteOffset(int row, int block, int slot) const {
    return row * row_stride + block * block_stride + slot / 64 * tile_stride + slot % 64;
  }
};

// For all but the sub-byte codes (subbyte_values.h): these formats have no offsets and no negative scales.
template <class Decoder>
KVANTA_INLINE void ScaleProbs(const ValuePass& pass, ScaledProbs& probs) {
  static_assert(Decoder::kOffset == 0);  // dots have no initial values
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell);
  const int first = pass.begin / 16 * 16, last = static_cast<int>(RoundUp(pass.end, 16));
  const ScaleSection& scales = cell.block_scales ? cell.block_scales : cell.token_scales;
  constexpr int64_t kRowBytes = kProbRowBytes<Decoder::kOperandBytes>, kBlockBytes = kPassRows * kRowBytes;
  probs.Place(pass.workspace, kRowBytes, kBlockBytes, int64_t{64} * Decoder::kOperandBytes);
  probs.SetBlocks(cell);
  const float side_scale = pass.scale * CodeUnit<Decoder>();
  if constexpr (requires { requires Decoder::kPackedBySoftmax; }) {
    if (pass.p == nullptr) {
      for (int row = 0; HasScaledOperands<Decoder>() && row < pass.rows; ++row) {
        probs.scale[row][0] = side_scale / MaxOperand<Decoder>();
        probs.offset[row][0] = 0;
      }
      return;
    }
  }
  alignas(64) float w[kPassRows][kMaxPageTokens];  // scaled operands
  alignas(64) float scale[kMaxPageTokens];         // scales of the block, shared by all rows
  for (int b = 0; b < blocks; ++b) {
    for (int t = first; t < last; t += 16) {
      Vec16::F x = Vec16::Mul(LoadScales(scales, b * cell.page_tokens + t), Vec16::Set1(side_scale));
      // Scales of unused slots are undefined.
      if (t < pass.begin || pass.end < t + 16) x = SelectRange(x, 0.0f, pass.begin - t, pass.end - t);
      Vec16::Store(scale + t, x);
    }
    Vec16::F maxima[kPassRows];
    for (int row = 0; row < pass.rows; ++row) {
      const float* p = pass.p + row * kMaxPageTokens;
      uint8_t* out = pass.workspace + row * kRowBytes + b * kBlockBytes;
      Vec16::F max = Vec16::Zero();
      for (int t = first; t < last; t += 16) {
        const Vec16::F x = Vec16::Mul(Vec16::Load(p + t), Vec16::Load(scale + t));
        if constexpr (HasScaledOperands<Decoder>()) {
          max = Vec16::Max(max, x);
          Vec16::Store(w[row] + t, x);
        } else {
          Decoder::Pack(x, out + t * Decoder::kOperandBytes);
        }
      }
      maxima[row] = max;
      probs.offset[row][b] = 0;
      probs.bias[row][b] = 0;
    }
    if constexpr (HasScaledOperands<Decoder>()) {
      float largest[kPassRows], inverse[kPassRows];
      ReduceMaxima(maxima, pass.rows, MaxOperand<Decoder>(), largest, inverse);
      for (int row = 0; row < pass.rows; ++row) {
        uint8_t* out = pass.workspace + row * kRowBytes + b * kBlockBytes;
        const Vec16::F factor = Vec16::Set1(inverse[row]);
        for (int t = first; t < last; t += 16) {
          Decoder::Pack(Vec16::Mul(Vec16::Load(w[row] + t), factor), out + t * Decoder::kOperandBytes);
        }
        probs.scale[row][b] = largest[row] / MaxOperand<Decoder>();
      }
    }
  }
}

// Consecutive words of tokens. A word holds 4 / (bytes of an element) tokens of a channel.
struct TokenRange {
  const uint8_t* lines;  // words of the first token
  int first;             // first token
  int words;
  bool rescale;  // the first range of a call rescales `out`
};

// Channels that one call of Dot() or DotValues() covers.
template <class Decoder>
KVANTA_INLINE constexpr int ColumnsOf() {
  if constexpr (requires { Decoder::kChannels; }) return Decoder::kChannels;
  return 16 * DotUnroll<Decoder>();  // all in one block: blocks of these codes are not smaller
}

// Columns of ColumnsOf() channels that one call covers where possible.
template <class Decoder>
KVANTA_INLINE constexpr int ColumnsUnroll() {
  if constexpr (requires { Decoder::kUnroll; }) return Decoder::kUnroll;
  return 1;
}

// Accumulates kCount columns of ColumnsOf<Decoder>() channels. kTail: a column with fewer channels left.
template <class Decoder, int kRows, bool kTail, int kCount>
KVANTA_INLINE void AddColumns(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range, int column,
                              int row, Prefetcher& prefetch) {
  constexpr int kPerColumn = ColumnsOf<Decoder>() / 16, kVectors = kCount * kPerColumn;
  // Locals, for the compiler cannot know that stores of results leave the structs as they are. Rows are constant
  // distances apart where possible: many pointers would not fit in the registers.
  const int64_t out_stride = pass.out_stride;
  float* out = pass.out + row * out_stride + column;
  const float* rescale_of = pass.rescale + row;
  const bool rescales = range.rescale;
  const int head_dim = pass.cell.head_dim;
  int64_t blocks[kVectors];
  const uint8_t* operands[kVectors];  // operands of the first row
  const float *scales[kVectors], *offsets[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int channel = !kTail || column + 16 * v < head_dim ? column + 16 * v : column;
    blocks[v] = probs.block_of[channel / 16];
    operands[v] =
        probs.rows + row * probs.row_stride + blocks[v] * probs.block_stride + range.first * Decoder::kOperandBytes;
    scales[v] = probs.scale[row] + blocks[v];
    offsets[v] = probs.offset[row] + blocks[v];
  }
  const int32_t* bias[kCount];
  for (int c = 0; c < kCount; ++c) bias[c] = probs.bias[row] + blocks[c * kPerColumn];
  Vec16::F dots[kRows * kVectors];
  if constexpr (requires { Decoder::kUnroll; }) {
    const uint8_t* signs[kCount] = {};
    for (int c = 0; c < kCount && probs.signs != nullptr; ++c) {
      signs[c] = probs.signs + blocks[c * kPerColumn] * pass.cell.page_tokens + range.first;
    }
    Decoder::template DotValues<kRows, kTail, kCount>(range.lines, head_dim, column, range.words, operands, signs, bias,
                                                      dots, prefetch);
  } else {
    const StridedLines columns{range.lines + int64_t{column} * 4, int64_t{head_dim} * 4, range.words, 64,
                               head_dim - column};
    const uint8_t* of_row[kRows];
    int32_t bias_of[kRows];
    for (int r = 0; r < kRows; ++r) {
      of_row[r] = operands[0] + r * probs.row_stride;
      bias_of[r] = bias[0][r * kMaxBlocks];
    }
    Decoder::template Dot<kVectors, kRows, kTail>(columns, of_row, bias_of, dots, prefetch);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, out += out_stride) {
    const Vec16::F rescale = Vec16::Set1(rescales ? rescale_of[r] : 1.0f);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec16::F scale = Vec16::Set1(scales[v][r * kMaxBlocks]);
      const Vec16::F offset = Vec16::Set1(offsets[v][r * kMaxBlocks]);
      const Vec16::F dot = dots[r * kVectors + v];
      const Vec16::F sum = HasScaledOperands<Decoder>() ? Vec16::Fma(dot, scale, offset) : dot;
      const int left = head_dim - column - 16 * v;
      if (!kTail || left >= 16) {
        Vec16::Store(out + 16 * v, Vec16::Fma(Vec16::Load(out + 16 * v), rescale, sum));
      } else if (left > 0) {
        Vec16::StoreTail(out + 16 * v, Vec16::Fma(Vec16::LoadTail(out + 16 * v, left), rescale, sum), left);
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
  constexpr int kColumns = ColumnsOf<Decoder>();
  constexpr int kUnroll = kRows == ManyRows<Decoder>() ? 1 : ColumnsUnroll<Decoder>();
  int column = 0;
  for (; kUnroll > 1 && column + kUnroll * kColumns <= pass.cell.head_dim; column += kUnroll * kColumns) {
    AddColumns<Decoder, kRows, false, kUnroll>(pass, probs, range, column, row, prefetch);
  }
  for (; column + kColumns <= pass.cell.head_dim; column += kColumns) {
    AddColumns<Decoder, kRows, false, 1>(pass, probs, range, column, row, prefetch);
  }
  // Few head dimensions have a tail: one instance, row by row.
  for (int r = 0; column < pass.cell.head_dim && r < kRows; ++r) {
    AddTailColumns<Decoder>(pass, probs, range, column, row + r, prefetch);
  }
}

template <class Decoder>
KVANTA_INLINE void AddTokenRange(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range,
                                 Prefetcher& prefetch) {
  ForRowTiles<Decoder>(
      pass.rows, [&]<int kRows>(RowCount<kRows>, int row)
                     __attribute__((always_inline)) { AddTile<Decoder, kRows>(pass, probs, range, row, prefetch); });
}

// Copies the words of token `first` with tokens outside [begin, end) zeroed: unused slots may hold NaN, which a
// probability of 0 does not cancel.
template <class Decoder>
KVANTA_INLINE void MaskWords(const uint8_t* lines, int head_dim, int first, int begin, int end, uint8_t* out) {
  uint32_t mask = 0;
  for (int t = 0; t < Decoder::kSub; ++t) {
    const uint32_t element = Decoder::kSub == 1 ? ~0U : (1U << (32 / Decoder::kSub)) - 1U;
    if (first + t >= begin && first + t < end) mask |= element << (t * 32 / Decoder::kSub);
  }
  for (int c = 0; c < head_dim; ++c) {
    uint32_t word;
    __builtin_memcpy(&word, lines + 4 * c, 4);
    word &= mask;
    __builtin_memcpy(out + 4 * c, &word, 4);
  }
}

// Prefetcher steps of a PV call over `words` rows of words.
template <class Decoder>
KVANTA_INLINE int AddSteps(const ValuePass& pass, int words) {
  constexpr int kChannels = ColumnsOf<Decoder>() * ColumnsUnroll<Decoder>();
  // Larger tiles of decoders that unroll columns cover fewer of these, with as many steps as two query tiles.
  const int tiles = ColumnsUnroll<Decoder>() > 1 ? QueryTiles(pass.rows) : RowTiles<Decoder>(pass.rows);
  return (pass.cell.head_dim + kChannels - 1) / kChannels * tiles * words;
}

template <class Decoder>
void Accumulate(const ValuePass& pass) {
  Prefetcher prefetch{pass.prefetch, AddSteps<Decoder>(pass, (pass.end - pass.begin) / (Decoder::kSub * kLinesOfStep))};
  ScaledProbs probs;
  ScaleProbs<Decoder>(pass, probs);
  const int64_t word_bytes = int64_t{pass.cell.head_dim} * 4;
  int begin = pass.begin / Decoder::kSub * Decoder::kSub;
  int end = static_cast<int>(RoundUp(pass.end, Decoder::kSub));
  bool rescale = true;
  const auto add = [&](const uint8_t* lines, int first, int last) {
    AddTokenRange<Decoder>(pass, probs, {lines, first, (last - first) / Decoder::kSub, rescale}, prefetch);
    rescale = false;
  };
  const auto lines_of = [&](int token) { return pass.cell.codes + token / Decoder::kSub * word_bytes; };
  if (Decoder::kInteger || (begin == pass.begin && end == pass.end)) {
    add(lines_of(begin), begin, end);
  } else {
    alignas(64) uint8_t masked[4 * kMaxHeadDim];
    const auto add_masked = [&](int first) {
      MaskWords<Decoder>(lines_of(first), pass.cell.head_dim, first, pass.begin, pass.end, masked);
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
