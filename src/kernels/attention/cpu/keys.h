// QK kernels, written once over the element types (codes_<isa>.h) and Vec16 of an ISA unit. Batch-invariant: sums are
// over channels in ascending order, whatever the rows of a call.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/scales.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"

namespace kvanta::kernels {
namespace {

// Sums of a prepared query's operands, per block.
template <class Decoder>
KVANTA_INLINE const float* QuerySums(const KeyPass& pass, int row) {
  const uint8_t* query = pass.query + row * pass.query_stride;
  return reinterpret_cast<const float*>(query + BiasOffset<Decoder>(pass.cell.head_dim)) + kMaxBlocks;
}

// Stores the scores of rows [row, row + kRows) on kGroups groups of 16 tokens from `group` on: sums times scales.
template <int kGroups, int kRows>
KVANTA_INLINE void StoreScores(const KeyPass& pass, int group, int row, Vec16::F* sums) {
  if (pass.cell.token_scales) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const Vec16::F scale = LoadScales(pass.cell.token_scales, (group + g) * 16);
#pragma GCC unroll 8
      for (int i = g; i < kRows * kGroups; i += kGroups) sums[i] = Vec16::Mul(sums[i], scale);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Vec16::F scale = Vec16::Set1(pass.row_scale[row + r]);
    float* scores = pass.scores + (row + r) * kMaxPageTokens + group * 16;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) Vec16::Store(scores + g * 16, Vec16::Mul(sums[r * kGroups + g], scale));
  }
}

// Scores rows [row, row + kRows) on kGroups groups of 16 tokens from `group` on, whose codes begin at `lines`. kBlocks:
// channels have scales per block.
template <class Decoder, int kGroups, bool kBlocks, int kRows>
KVANTA_INLINE void ScoreTile(const KeyPass& pass, const uint8_t* lines, int group, int row, Prefetcher& prefetch) {
  const CellView& cell = pass.cell;
  const int channels = kBlocks ? cell.block : cell.head_dim;  // per block
  const int64_t bias_offset = BiasOffset<Decoder>(cell.head_dim);
  const int64_t group_bytes = int64_t{cell.head_dim} * (32 / Decoder::kSub) * 2;
  Vec16::F sums[kRows * kGroups];
  const auto dots_of = [&](int b, Vec16::F* dots) __attribute__((always_inline)) {
    const uint8_t* operands[kRows];
    int32_t bias[kRows];
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* query = pass.query + (row + r) * pass.query_stride;
      operands[r] = query + int64_t{b} * channels * Decoder::kOperandBytes;
      bias[r] = reinterpret_cast<const int32_t*>(query + bias_offset)[b];
    }
    const StridedLines block{lines + int64_t{b} * channels / Decoder::kSub * 64, 64, channels / Decoder::kSub,
                             group_bytes, 16 * kGroups};
    Decoder::template Dot<kGroups, kRows, false>(block, operands, bias, dots, prefetch);
  };
  if constexpr (!kBlocks) {
    dots_of(0, sums);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kGroups; ++i) sums[i] = Vec16::Zero();
    for (int b = 0; b * channels < cell.head_dim; ++b) {
      Vec16::F dots[kRows * kGroups];
      dots_of(b, dots);
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        const Vec16::F scale = LoadScales(cell.block_scales, b * cell.page_tokens + (group + g) * 16);
#pragma GCC unroll 8
        for (int i = g; i < kRows * kGroups; i += kGroups) sums[i] = Vec16::Fma(dots[i], scale, sums[i]);
      }
    }
  }
  StoreScores<kGroups, kRows>(pass, group, row, sums);
}

// ScoreTile() of all rows.
template <class Decoder, int kGroups, bool kBlocks>
KVANTA_INLINE void ScoreRowTiles(const KeyPass& pass, const uint8_t* lines, int group, Prefetcher& prefetch) {
  ForRowTiles<Decoder>(
      pass.rows, [&]<int kRows>(RowCount<kRows>, int row) __attribute__((always_inline)) {
        ScoreTile<Decoder, kGroups, kBlocks, kRows>(pass, lines, group, row, prefetch);
      });
}

// Scores all rows on kGroups groups of 16 tokens from `group` on, whose codes begin at `lines`.
template <class Decoder, int kGroups>
KVANTA_INLINE void ScoreGroups(const KeyPass& pass, const uint8_t* lines, int group, Prefetcher& prefetch) {
  if constexpr (requires { requires !Decoder::kHasBlockScales; }) {
    ScoreRowTiles<Decoder, kGroups, false>(pass, lines, group, prefetch);
  } else {
    pass.cell.block_scales ? ScoreRowTiles<Decoder, kGroups, true>(pass, lines, group, prefetch)
                           : ScoreRowTiles<Decoder, kGroups, false>(pass, lines, group, prefetch);
  }
}

// Prefetcher steps of a QK call of `tiles` tiles of rows that scores `groups` groups at a time and steps every
// `channels` channels.
KVANTA_INLINE constexpr int ScoreSteps(const KeyPass& pass, int tiles, int groups, int channels) {
  return (pass.groups + groups - 1) / groups * tiles * (pass.cell.head_dim / channels);
}

template <class Decoder>
void Score(const KeyPass& pass) {
  constexpr int kGroups = DotUnroll<Decoder>();
  Prefetcher prefetch{pass.prefetch,
                      ScoreSteps(pass, RowTiles<Decoder>(pass.rows), kGroups, Decoder::kSub * kLinesOfStep)};
  const int64_t group_bytes = int64_t{pass.cell.head_dim} * (32 / Decoder::kSub) * 2;
  int group = 0;
  for (; group + kGroups <= pass.groups; group += kGroups) {
    ScoreGroups<Decoder, kGroups>(pass, pass.cell.codes + group * group_bytes, group, prefetch);
  }
  if (group < pass.groups) ScoreGroups<Decoder, 1>(pass, pass.cell.codes + group * group_bytes, group, prefetch);
}

}  // namespace
}  // namespace kvanta::kernels
