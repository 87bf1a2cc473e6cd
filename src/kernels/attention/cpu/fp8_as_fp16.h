// The attention kernels of fp8 on units that make fp16 of it first, on the stack (K: 16 tokens at a time, V: up to 64):
// each code is converted once for all rows of a pass, and the kernels of fp16 go over it. Included by isa_<isa>.cc
// after attention_kernels.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/kernels.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

template <class Decoder>
float PrepareFp8AsFp16(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareQuery<Decoder>(query, head_dim, block, out) * Decoder::kFactor;
}

// Not inlined into the kernels of each code: they would be twice as long to compile.
template <class Halves>
__attribute__((noinline)) void ScoreFp8AsFp16Group(const KeyPass& pass, const uint8_t* lines, int group,
                                                   Prefetcher& prefetch) {
  ScoreGroups<Halves, 1>(pass, lines, group, prefetch);
}

template <class Decoder>
void ScoreFp8AsFp16(const KeyPass& pass) {
  alignas(64) uint8_t halves[2 * 16 * kMaxHeadDim];
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, 1, Decoder::Halves::kSub * kLinesOfStep)};
  for (int group = 0; group < pass.groups; ++group) {
    Decoder::Unpack(pass.cell.codes + int64_t{group} * 16 * pass.cell.head_dim, pass.cell.head_dim / 4, 16, halves);
    ScoreFp8AsFp16Group<typename Decoder::Halves>(pass, halves, group, prefetch);
  }
}

template <class Halves>
__attribute__((noinline)) void AddFp8AsFp16(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range,
                                            Prefetcher& prefetch) {
  AddTokenRange<Halves>(pass, probs, range, prefetch);
}

inline constexpr int kFp8AsFp16Tokens = 64;

template <class Decoder>
void AccumulateFp8AsFp16(const ValuePass& pass) {
  alignas(64) uint8_t halves[2 * kFp8AsFp16Tokens * kMaxHeadDim];
  Prefetcher prefetch{pass.prefetch, AddSteps<typename Decoder::Halves>(
                                         pass, (pass.end - pass.begin) / (Decoder::Halves::kSub * kLinesOfStep))};
  ScaledProbs probs;
  ValuePass scaled = pass;
  scaled.scale *= Decoder::kFactor;
  ScaleProbs<Decoder>(scaled, probs);
  const int head_dim = pass.cell.head_dim;
  const int begin = pass.begin / 4 * 4, end = static_cast<int>(RoundUp(pass.end, 4));
  for (int first = begin; first < end; first += kFp8AsFp16Tokens) {
    const int last = first + kFp8AsFp16Tokens < end ? first + kFp8AsFp16Tokens : end;
    Decoder::Unpack(pass.cell.codes + int64_t{first} * head_dim, (last - first) / 4, head_dim, halves);
    // Unused slots may hold NaN, which no weight of 0 removes.
    for (int t = first; t < last; ++t) {
      if (pass.begin <= t && t < pass.end) continue;
      const int place = (t - first) / 4 * 2 + t % 2;  // of its row of units
      uint8_t* units = halves + int64_t{place} * 4 * head_dim + t % 4 / 2 * 2;
      for (int c = 0; c < head_dim; ++c) __builtin_memset(units + 4 * c, 0, 2);
    }
    AddFp8AsFp16<typename Decoder::Halves>(pass, probs, {halves, first, (last - first) / 2, first == begin}, prefetch);
  }
}

}  // namespace
}  // namespace kvanta::kernels
