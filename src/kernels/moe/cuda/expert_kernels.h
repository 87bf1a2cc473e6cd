// MoE kernels: top-k routing, permutation of rows by expert, combination of the experts' outputs. Include the
// primitives first.
#pragma once

#include <limits>

#include "kernels/cuda/row_kernels.h"

namespace kvanta::kernels::cuda {

// ---- experts of tokens

inline LaunchShape ShapeOf(const KeepExpertsOp& op) {
  return ValuesShape(op.rows * op.experts);
}
KVANTA_DEVICE void RunBlock(const KeepExpertsOp& op) {
  ForValues(op.rows * op.experts, [&](int64_t index) {
    const int32_t* kept = op.experts_of_token + int64_t{op.tokens[index / op.experts]} * op.of_token;
    for (int32_t i = 0; i < op.of_token; ++i) {
      if (kept[i] == index % op.experts) return;
    }
    op.logits[index] = -std::numeric_limits<float>::infinity();
  });
}

// ---- top-k routing: one warp per row

inline LaunchShape ShapeOf(const TopKOp& op) {
  return {op.rows, kWarp, 3 * 4 * op.moe.num_experts};
}

// Rank of value `index` among f32 values in shared memory, in descending order, ties by index.
KVANTA_DEVICE int RankOf(int values, int count, int index) {
  const auto own = LoadShared<float>(values + 4 * index);
  int rank = 0;
  for (int i = 0; i < count; ++i) {
    const auto other = LoadShared<float>(values + 4 * i);
    rank += RanksBefore(other, i, own, index) ? 1 : 0;
  }
  return rank;
}

// Masks experts outside the topk_group best groups.
KVANTA_DEVICE void KeepBestGroups(const MoeConfig& moe, int choices, int groups, int lane) {
  constexpr float kMin = -std::numeric_limits<float>::infinity();
  const int size = moe.num_experts / moe.n_group;
  for (int group = lane; group < moe.n_group; group += kWarp) {
    float best = kMin;
    float second = kMin;
    for (int i = group * size; i < (group + 1) * size; ++i) {
      const auto choice = LoadShared<float>(choices + 4 * i);
      second = fmaxf(second, fminf(best, choice));
      best = fmaxf(best, choice);
    }
    StoreShared(groups + 4 * group, GroupScore(moe, best, second));
  }
  SyncWarp();
  for (int group = lane; group < moe.n_group; group += kWarp) {
    if (RankOf(groups, moe.n_group, group) < moe.topk_group) continue;
    for (int i = group * size; i < (group + 1) * size; ++i) StoreShared(choices + 4 * i, kMin);
  }
  SyncWarp();
}

// The best of f32 values in shared memory, of equal ones the first; the first of all if none is a number.
KVANTA_DEVICE int IndexOfBest(int values, int count, int lane) {
  float best = -std::numeric_limits<float>::infinity();
  int index = count;  // none
  const auto take = [&](float value, int i) {
    if (i >= count || (index < count && !RanksBefore(value, i, best, index))) return;
    best = value;
    index = i;
  };
  for (int i = lane; i < count; i += kWarp) {
    const auto value = LoadShared<float>(values + 4 * i);
    if (value == value) take(value, i);
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float value = ShuffleXor(best, mask);
    take(value, ShuffleXor(index, mask));
  }
  return index < count ? index : 0;
}

// SparseMixer (arXiv:2409.12136, section 2.1), without its noise: as on the CPU but for rounding.
KVANTA_DEVICE void ChooseBySparseMixer(const TopKOp& op) {
  const MoeConfig& moe = op.moe;
  const int64_t row = BlockIndex();
  const int lane = ThreadIndex();
  const float* logits = op.logits + row * moe.num_experts;
  for (int i = lane; i < moe.num_experts; i += kWarp) StoreShared(4 * i, logits[i]);
  SyncWarp();
  int experts[2];
  float weights[2];
  KVANTA_UNROLL
  for (int chosen = 0; chosen < 2; ++chosen) {
    experts[chosen] = IndexOfBest(0, moe.num_experts, lane);
    const auto best = LoadShared<float>(4 * experts[chosen]);
    float sum = 0;
    for (int i = lane; i < moe.num_experts; i += kWarp) {
      const float scale = fmaxf(fabsf(logits[i]), best);
      const bool is_close = (best - logits[i]) / scale <= 2 * moe.router_jitter_noise;
      if (is_close) sum += Exp2((LoadShared<float>(4 * i) - best) * kLog2E);
    }
    for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += ShuffleXor(sum, mask);
    weights[chosen] = RoutingWeight(moe, 1 / sum, 1);
    SyncWarp();
    if (lane == 0) StoreShared(4 * experts[chosen], -std::numeric_limits<float>::infinity());
    SyncWarp();
  }
  if (lane != 0) return;
  const int first = experts[0] < experts[1] ? 0 : 1;  // ascending
  for (int i = 0; i < 2; ++i) {
    op.experts[2 * row + i] = experts[i == 0 ? first : 1 - first];
    op.weights[2 * row + i] = weights[i == 0 ? first : 1 - first];
  }
}

// Score of an expert; max, sum: of the softmax.
KVANTA_DEVICE float ExpertScore(ScoringFunc function, float logit, float max, float sum) {
  if (function == ScoringFunc::kSigmoid) return 1.0F / (1.0F + Exp2(-logit * kLog2E));
  if (function == ScoringFunc::kSoftmax) return Exp2((logit - max) * kLog2E) / sum;
  return SquareRoot((logit > 0 ? logit : 0.0F) + log1pf(expf(-fabsf(logit))));  // -infinity has the score 0
}

KVANTA_DEVICE void RunBlock(const TopKOp& op) {
  if (op.moe.scoring_func == ScoringFunc::kSparseMixer) return ChooseBySparseMixer(op);
  const MoeConfig& moe = op.moe;
  const int64_t row = BlockIndex();
  const int lane = ThreadIndex();
  const int scores = 0;
  const int choices = 4 * moe.num_experts;
  const int selected = 8 * moe.num_experts;
  const float* logits = op.logits + row * moe.num_experts;
  const auto warp_sum = [](float sum) {
    for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += ShuffleXor(sum, mask);
    return sum;
  };
  float max = -std::numeric_limits<float>::infinity();
  for (int i = lane; i < moe.num_experts; i += kWarp) max = fmaxf(max, logits[i]);
  for (int mask = kWarp / 2; mask > 0; mask /= 2) max = fmaxf(max, ShuffleXor(max, mask));
  float sum = 0;
  for (int i = lane; moe.scoring_func == ScoringFunc::kSoftmax && i < moe.num_experts; i += kWarp)
    sum += Exp2((logits[i] - max) * kLog2E);
  sum = warp_sum(sum);
  for (int i = lane; i < moe.num_experts; i += kWarp) {
    const float score = ExpertScore(moe.scoring_func, logits[i], max, sum);
    // Without a correction the order of the logits is that of the scores, but for scores that are rounded to 1 or 0.
    const float choice = moe.n_group > 1 ? score : logits[i];
    StoreShared(scores + 4 * i, score);
    StoreShared(choices + 4 * i,
                op.e_score_correction_bias != nullptr ? score + op.e_score_correction_bias[i] : choice);
  }
  SyncWarp();
  if (moe.n_group > 1) KeepBestGroups(moe, choices, selected, lane);
  float total = 0;
  for (int i = lane; i < moe.num_experts; i += kWarp) {
    const bool is_selected = RankOf(choices, moe.num_experts, i) < moe.num_experts_per_tok;
    StoreShared(selected + 4 * i, is_selected ? 1 : 0);
    if (is_selected) total += LoadShared<float>(scores + 4 * i);
  }
  total = warp_sum(total);
  SyncWarp();
  for (int i = lane; i < moe.num_experts; i += kWarp) {
    if (LoadShared<int>(selected + 4 * i) == 0) continue;
    int index = 0;
    for (int before = 0; before < i; ++before) index += LoadShared<int>(selected + 4 * before);
    if (index >= moe.num_experts_per_tok) continue;  // NaN scores may select more than top_k
    const auto score = LoadShared<float>(scores + 4 * i);
    op.experts[row * moe.num_experts_per_tok + index] = i;
    const float scale = op.per_expert_scale == nullptr ? 1.0F : op.per_expert_scale[i];
    op.weights[row * moe.num_experts_per_tok + index] = RoutingWeight(moe, score, total) * scale;
  }
}

// ---- permutation: one block

inline LaunchShape ShapeOf(const PermuteOp& op) {
  return {1, kRowThreads, 4 * op.expert_count};
}
KVANTA_DEVICE void PadRow(const PermuteOp& op, int permuted) {
  op.source_rows[permuted] = 0;
  if (op.row_weights != nullptr) op.row_weights[permuted] = 0;
}
KVANTA_DEVICE void RunBlock(const PermuteOp& op) {
  const auto entries = static_cast<int>(op.rows * op.top_k);
  for (int expert = ThreadIndex(); expert < op.expert_count; expert += kRowThreads) {
    int rows = 0;
    for (int i = 0; i < entries; ++i) rows += op.experts[i] == expert ? 1 : 0;
    StoreShared(4 * expert, (rows + op.tile_rows - 1) / op.tile_rows);
  }
  SyncBlock();
  for (int expert = ThreadIndex(); expert < op.expert_count; expert += kRowThreads) {
    int tile = 0;
    for (int before = 0; before < expert; ++before) tile += LoadShared<int>(4 * before);
    const int end = tile + LoadShared<int>(4 * expert);
    int permuted = tile * op.tile_rows;
    for (int i = 0; permuted < end * op.tile_rows && i < entries; ++i) {
      if (op.experts[i] != expert) continue;
      op.permuted_rows[i] = permuted;
      if (op.row_weights != nullptr) op.row_weights[permuted] = op.weights[i];
      op.source_rows[permuted++] = i / op.top_k;
    }
    for (; permuted < end * op.tile_rows; ++permuted) PadRow(op, permuted);
    for (; tile < end; ++tile) op.tile_experts[tile] = expert;
  }
  int used = 0;
  for (int expert = 0; expert < op.expert_count; ++expert) used += LoadShared<int>(4 * expert);
  for (int tile = used + ThreadIndex(); tile < op.max_tiles; tile += kRowThreads) {
    op.tile_experts[tile] = -1;
    for (int i = 0; i < op.tile_rows; ++i) PadRow(op, tile * op.tile_rows + i);
  }
}

// ---- combination

inline LaunchShape ShapeOf(const CombineOp& op) {
  return ValuesShape(op.rows * op.width);
}
KVANTA_DEVICE void RunBlock(const CombineOp& op) {
  ForValues(op.rows * op.width, [&](int64_t index) {
    const int64_t row = index / op.width;
    float sum = 0;
    for (int i = 0; i < op.top_k; ++i) {
      const float weight = op.weights[row * op.top_k + i];
      if (weight == 0) continue;
      const float value = op.expert_out[op.permuted_rows[row * op.top_k + i] * op.width + index % op.width];
      sum += op.weighted_before ? value : value * weight;
    }
    op.out[index] = sum;
  });
}

}  // namespace kvanta::kernels::cuda
