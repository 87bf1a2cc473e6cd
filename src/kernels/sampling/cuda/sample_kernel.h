// Argmax and sampling, one block per row of logits. Include the primitives first.
#pragma once

#include "kernels/cuda/row_kernels.h"
#include "kernels/sampling/cuda/topk_topp_sampling.h"

namespace kvanta::kernels::cuda {

// ---- argmax

inline LaunchShape ShapeOf(const ArgmaxOp& op) {
  return {op.rows, kRowThreads, 12 * kRowWarps};
}

struct ArgmaxState {
  float value;
  int32_t column;
  int32_t finite;

  KVANTA_DEVICE void Update(float other, int32_t other_column) {
    if (other > value || (other == value && other_column < column)) {
      value = other;
      column = other_column;
    }
  }
};

KVANTA_DEVICE void RunBlock(const ArgmaxOp& op) {
  const float* x = op.x + int64_t{BlockIndex()} * op.stride;
  ArgmaxState max{-std::bit_cast<float>(0x7F800000U), 0x7FFFFFFF, 1};
  for (int64_t i = ThreadIndex(); i < op.width; i += kRowThreads) {
    max.finite &= (std::bit_cast<uint32_t>(x[i]) & 0x7F800000U) != 0x7F800000U ? 1 : 0;
    max.Update(x[i], static_cast<int32_t>(i));
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float value = ShuffleXor(max.value, mask);
    max.Update(value, ShuffleXor(max.column, mask));
    max.finite &= ShuffleXor(max.finite, mask);
  }
  const int warp = ThreadIndex() / kWarp;
  if (ThreadIndex() % kWarp == 0) {
    StoreShared(12 * warp, max.value);
    StoreShared(12 * warp + 4, max.column);
    StoreShared(12 * warp + 8, max.finite);
  }
  SyncBlock();
  if (ThreadIndex() != 0) return;
  for (int other = 1; other < kRowWarps; ++other) {
    max.Update(LoadShared<float>(12 * other), LoadShared<int32_t>(12 * other + 4));
    max.finite &= LoadShared<int32_t>(12 * other + 8);
  }
  op.argmaxes[BlockIndex()] = {max.value, max.column, max.finite != 0};
}

// ---- sampling

inline LaunchShape ShapeOf(const SampleOp& op) {
  constexpr int kInverseCdfBytes = 8 * kRowThreads + 8;
  return {op.rows, kRowThreads, kInverseCdfBytes > kThresholdSearchBytes ? kInverseCdfBytes : kThresholdSearchBytes};
}

// Inverse-CDF sampling in token-id order, like runner::Sampler on the host: the same terms in doubles, summed in an
// order that depends on the row's width alone. -1 if the row is not finite or not to be sampled.
KVANTA_DEVICE void RunBlock(const SampleOp& op) {
  constexpr int kTotalAt = 8 * kRowThreads;
  const int64_t row = BlockIndex();
  const SampleParams params = op.params[row];
  const RowArgmax max = op.argmaxes[row];
  if (!max.finite || !(params.scale > 0)) {  // uniform in the block
    if (ThreadIndex() == 0) op.tokens[row] = max.finite && params.scale == 0 ? max.column : -1;
    return;
  }
  const float* logits = op.logits + row * op.width;
  if (params.top_k > 0 || params.top_p < 1) {  // uniform in the block
    const int32_t token = SampleAboveThreshold(logits, op.width, max.value, params);
    if (ThreadIndex() == 0) op.tokens[row] = token;
    return;
  }
  const float min_logit = max.value + params.min_logit_offset;
  const auto term = [&](int64_t token) {
    return logits[token] >= min_logit ? ExpOfNegative((logits[token] - max.value) * params.scale) : 0.0F;
  };
  const int64_t share = (op.width + kRowThreads - 1) / kRowThreads;
  const int64_t begin = ThreadIndex() * share;
  const int64_t end = begin + share < op.width ? begin + share : op.width;
  double sum = 0;
  for (int64_t token = begin; token < end; ++token) sum += static_cast<double>(term(token));
  StoreShared(8 * ThreadIndex(), sum);
  SyncBlock();
  if (ThreadIndex() == 0) {  // exclusive prefix sums of the shares
    double before = 0;
    for (int i = 0; i < kRowThreads; ++i) {
      const double own = LoadShared<double>(8 * i);
      StoreShared(8 * i, before);
      before += own;
    }
    StoreShared(kTotalAt, before);
  }
  SyncBlock();
  const double target = params.uniform * LoadShared<double>(kTotalAt);
  const double before = LoadShared<double>(8 * ThreadIndex());
  const double after =
      ThreadIndex() + 1 < kRowThreads ? LoadShared<double>(8 * (ThreadIndex() + 1)) : LoadShared<double>(kTotalAt);
  // Exactly one share contains the target: the sums grow from 0 to above it.
  if (!(before <= target && target < after)) return;
  double cumulative = before;
  int64_t token_id = begin;
  for (int64_t token = begin; token < end; ++token) {
    const auto own = static_cast<double>(term(token));
    if (own == 0) continue;
    cumulative += own;
    token_id = token;  // the last one, if rounding keeps the sum at or below the target
    if (cumulative > target) break;
  }
  op.tokens[row] = static_cast<int32_t>(token_id);
}

}  // namespace kvanta::kernels::cuda
