// The largest logit of each row, and a token drawn from it. A unit that includes this has included the primitives.
#pragma once

#include "kernels/cuda/row_kernels.h"
#include "kernels/sampling/cuda/topk_topp_sampling.h"

namespace kvanta::kernels::cuda {

// ---- peaks

inline LaunchShape ShapeOf(const ArgmaxWork& work) {
  return {work.rows, kRowThreads, 12 * kRowWarps};
}

struct Max {
  float value;
  int32_t column;
  int32_t finite;

  KVANTA_DEVICE void Take(float other, int32_t at) {
    if (other > value || (other == value && at < column)) {
      value = other;
      column = at;
    }
  }
};

KVANTA_DEVICE void RunBlock(const ArgmaxWork& work) {
  const float* x = work.x + int64_t{BlockIndex()} * work.stride;
  Max max_value{-std::bit_cast<float>(0x7F800000U), 0x7FFFFFFF, 1};
  for (int64_t i = ThreadIndex(); i < work.width; i += kRowThreads) {
    max_value.finite &= (std::bit_cast<uint32_t>(x[i]) & 0x7F800000U) != 0x7F800000U ? 1 : 0;
    max_value.Take(x[i], static_cast<int32_t>(i));
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float value = ShuffleXor(max_value.value, mask);
    max_value.Take(value, ShuffleXor(max_value.column, mask));
    max_value.finite &= ShuffleXor(max_value.finite, mask);
  }
  const int warp = ThreadIndex() / kWarp;
  if (ThreadIndex() % kWarp == 0) {
    StoreShared(12 * warp, max_value.value);
    StoreShared(12 * warp + 4, max_value.column);
    StoreShared(12 * warp + 8, max_value.finite);
  }
  SyncBlock();
  if (ThreadIndex() != 0) return;
  for (int other = 1; other < kRowWarps; ++other) {
    max_value.Take(LoadShared<float>(12 * other), LoadShared<int32_t>(12 * other + 4));
    max_value.finite &= LoadShared<int32_t>(12 * other + 8);
  }
  work.argmaxes[BlockIndex()] = {max_value.value, max_value.column, max_value.finite != 0};
}

// ---- draws

inline LaunchShape ShapeOf(const SampleWork& work) {
  constexpr int kPlain = 8 * kRowThreads + 8;
  return {work.rows, kRowThreads, kPlain > kCutBytes ? kPlain : kCutBytes};
}

// Inverse of the cumulative distribution in the order of ids, as runner::Sampler does it on the host: the same terms,
// in doubles, whose sum a row gets in an order of its own width. -1 where the row is not finite, or its draw is not
// wanted.
KVANTA_DEVICE void RunBlock(const SampleWork& work) {
  constexpr int kTotalAt = 8 * kRowThreads;
  const int64_t row = BlockIndex();
  const SampleParams draw = work.draws[row];
  const RowArgmax max_value = work.argmaxes[row];
  if (!max_value.finite || !(draw.scale > 0)) {  // the whole block
    if (ThreadIndex() == 0) work.tokens[row] = max_value.finite && draw.scale == 0 ? max_value.column : -1;
    return;
  }
  const float* logits = work.logits + row * work.width;
  if (draw.top_k > 0 || draw.top_p < 1) {  // the whole block
    const int32_t token = SampleAboveThreshold(logits, work.width, max_value.value, draw);
    if (ThreadIndex() == 0) work.tokens[row] = token;
    return;
  }
  const float floor = max_value.value + draw.min_logit_offset;
  const auto term = [&](int64_t token) {
    return logits[token] >= floor ? ExpOfNegative((logits[token] - max_value.value) * draw.scale) : 0.0F;
  };
  const int64_t share = (work.width + kRowThreads - 1) / kRowThreads;
  const int64_t begin = ThreadIndex() * share;
  const int64_t end = begin + share < work.width ? begin + share : work.width;
  double sum = 0;
  for (int64_t token = begin; token < end; ++token) sum += static_cast<double>(term(token));
  StoreShared(8 * ThreadIndex(), sum);
  SyncBlock();
  if (ThreadIndex() == 0) {  // sums of what lies before each share
    double before = 0;
    for (int i = 0; i < kRowThreads; ++i) {
      const double own = LoadShared<double>(8 * i);
      StoreShared(8 * i, before);
      before += own;
    }
    StoreShared(kTotalAt, before);
  }
  SyncBlock();
  const double target = draw.uniform * LoadShared<double>(kTotalAt);
  const double before = LoadShared<double>(8 * ThreadIndex());
  const double after =
      ThreadIndex() + 1 < kRowThreads ? LoadShared<double>(8 * (ThreadIndex() + 1)) : LoadShared<double>(kTotalAt);
  // One share has the target: sums grow from 0 to more than it.
  if (!(before <= target && target < after)) return;
  double reached = before;
  int64_t chosen = begin;
  for (int64_t token = begin; token < end; ++token) {
    const auto own = static_cast<double>(term(token));
    if (own == 0) continue;
    reached += own;
    chosen = token;  // catches rounding at the end of the share
    if (reached > target) break;
  }
  work.tokens[row] = static_cast<int32_t>(chosen);
}

}  // namespace kvanta::kernels::cuda
