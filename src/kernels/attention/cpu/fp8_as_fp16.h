// fp8 kernels of units that decode fp8 to fp16 on the stack first (K: 16 tokens at a time, V: up to 64): each code is
// converted once for all rows of a call, then the fp16 kernels run over it. Included by isa_<isa>.cc after values.h.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/values.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

template <class Decoder>
float PrepareFp8AsFp16(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareQuery<Decoder>(query, head_dim, block, out) * Decoder::kFactor;
}

// Not inlined into the kernel of each element type, which would double the compile time.
template <class Fp16Code>
__attribute__((noinline)) void ScoreFp8AsFp16Group(const KeyPass& pass, const uint8_t* lines, int group,
                                                   Prefetcher& prefetch) {
  ScoreGroups<Fp16Code, 1>(pass, lines, group, prefetch);
}

template <class Decoder>
void ScoreFp8AsFp16(const KeyPass& pass) {
  alignas(64) uint8_t fp16[2 * 16 * kMaxHeadDim];
  Prefetcher prefetch{pass.prefetch,
                      ScoreSteps(pass, QueryTiles(pass.rows), 1, Decoder::Fp16Code::kSub * kLinesOfStep)};
  for (int group = 0; group < pass.groups; ++group) {
    Decoder::Unpack(pass.cell.codes + int64_t{group} * 16 * pass.cell.head_dim, pass.cell.head_dim / 4, 16, fp16);
    ScoreFp8AsFp16Group<typename Decoder::Fp16Code>(pass, fp16, group, prefetch);
  }
}

template <class Fp16Code>
__attribute__((noinline)) void AddFp16(const ValuePass& pass, const ScaledProbs& probs, const TokenRange& range,
                                       Prefetcher& prefetch) {
  AddTokenRange<Fp16Code>(pass, probs, range, prefetch);
}

inline constexpr int kFp8AsFp16Tokens = 64;

template <class Decoder>
void AccumulateFp8AsFp16(const ValuePass& pass) {
  alignas(64) uint8_t fp16[2 * kFp8AsFp16Tokens * kMaxHeadDim];
  Prefetcher prefetch{pass.prefetch, AddSteps<typename Decoder::Fp16Code>(
                                         pass, (pass.end - pass.begin) / (Decoder::Fp16Code::kSub * kLinesOfStep))};
  ScaledProbs probs;
  ValuePass scaled = pass;
  scaled.scale *= Decoder::kFactor;
  ScaleProbs<Decoder>(scaled, probs);
  const int head_dim = pass.cell.head_dim;
  const int begin = pass.begin / 4 * 4, end = static_cast<int>(RoundUp(pass.end, 4));
  for (int first = begin; first < end; first += kFp8AsFp16Tokens) {
    const int last = first + kFp8AsFp16Tokens < end ? first + kFp8AsFp16Tokens : end;
    Decoder::Unpack(pass.cell.codes + int64_t{first} * head_dim, (last - first) / 4, head_dim, fp16);
    // Unused slots may hold NaN, which a probability of 0 does not cancel.
    for (int t = first; t < last; ++t) {
      if (pass.begin <= t && t < pass.end) continue;
      const int row = (t - first) / 4 * 2 + t % 2;  // row of words
      uint8_t* words = fp16 + int64_t{row} * 4 * head_dim + t % 4 / 2 * 2;
      for (int c = 0; c < head_dim; ++c) __builtin_memset(words + 4 * c, 0, 2);
    }
    AddFp16<typename Decoder::Fp16Code>(pass, probs, {fp16, first, (last - first) / 2, first == begin}, prefetch);
  }
}

}  // namespace
}  // namespace kvanta::kernels
