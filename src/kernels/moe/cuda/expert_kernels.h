// Layers of experts: which experts take a row, where the rows of an expert lie together, and their sum. A unit that
// includes this has included the primitives.
#pragma once

#include <limits>

#include "kernels/cuda/row_kernels.h"

namespace kvanta::kernels::cuda {

// ---- a warp for each row of logits

inline LaunchShape ShapeOf(const RouteWork& work) {
  return {work.rows, kWarp, 3 * 4 * work.moe.num_experts};
}

// Of f32 values in shared memory: how many are before value `index`, from the largest on, of equals the first.
KVANTA_DEVICE int RankOf(int values, int count, int index) {
  const auto own = LoadShared<float>(values + 4 * index);
  int rank = 0;
  for (int i = 0; i < count; ++i) {
    const auto other = LoadShared<float>(values + 4 * i);
    rank += RanksBefore(other, i, own, index) ? 1 : 0;
  }
  return rank;
}

// Excludes the experts outside the best groups.
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

KVANTA_DEVICE void RunBlock(const RouteWork& work) {
  constexpr float kLog2E = 1.44269504F;
  const MoeConfig& moe = work.moe;
  const int64_t row = BlockIndex();
  const int lane = ThreadIndex();
  const int scores = 0;
  const int choices = 4 * moe.num_experts;
  const int taken = 8 * moe.num_experts;
  const float* logits = work.logits + row * moe.num_experts;
  const auto sum_of = [](float sum) {
    for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += ShuffleXor(sum, mask);
    return sum;
  };
  float limit = -std::numeric_limits<float>::infinity();
  for (int i = lane; i < moe.num_experts; i += kWarp) limit = fmaxf(limit, logits[i]);
  for (int mask = kWarp / 2; mask > 0; mask /= 2) limit = fmaxf(limit, ShuffleXor(limit, mask));
  float sum = 0;
  for (int i = lane; moe.scoring_func == ScoringFunc::kSoftmax && i < moe.num_experts; i += kWarp)
    sum += Exp2((logits[i] - limit) * kLog2E);
  sum = sum_of(sum);
  for (int i = lane; i < moe.num_experts; i += kWarp) {
    const float score = moe.scoring_func == ScoringFunc::kSigmoid ? 1.0F / (1.0F + Exp2(-logits[i] * kLog2E))
                                                                  : Exp2((logits[i] - limit) * kLog2E) / sum;
    StoreShared(scores + 4 * i, score);
    StoreShared(choices + 4 * i,
                work.e_score_correction_bias != nullptr ? score + work.e_score_correction_bias[i] : score);
  }
  SyncWarp();
  if (moe.n_group > 1) KeepBestGroups(moe, choices, taken, lane);
  float total = 0;
  for (int i = lane; i < moe.num_experts; i += kWarp) {
    const bool is_taken = RankOf(choices, moe.num_experts, i) < moe.num_experts_per_tok;
    StoreShared(taken + 4 * i, is_taken ? 1 : 0);
    if (is_taken) total += LoadShared<float>(scores + 4 * i);
  }
  total = sum_of(total);
  SyncWarp();
  for (int i = lane; i < moe.num_experts; i += kWarp) {
    if (LoadShared<int>(taken + 4 * i) == 0) continue;
    int place = 0;
    for (int before = 0; before < i; ++before) place += LoadShared<int>(taken + 4 * before);
    if (place >= moe.num_experts_per_tok) continue;  // of a row with NaN, which compares with nothing, more are taken
    const auto score = LoadShared<float>(scores + 4 * i);
    work.experts[row * moe.num_experts_per_tok + place] = i;
    work.weights[row * moe.num_experts_per_tok + place] = RoutingWeight(moe, score, total);
  }
}

// ---- one block

inline LaunchShape ShapeOf(const SlotWork& work) {
  return {1, kRowThreads, 4 * work.count};
}
KVANTA_DEVICE void RunBlock(const SlotWork& work) {
  const auto entries = static_cast<int>(work.rows * work.chosen);
  for (int expert = ThreadIndex(); expert < work.count; expert += kRowThreads) {
    int rows = 0;
    for (int i = 0; i < entries; ++i) rows += work.experts[i] == expert ? 1 : 0;
    StoreShared(4 * expert, (rows + work.tile_rows - 1) / work.tile_rows);
  }
  SyncBlock();
  for (int expert = ThreadIndex(); expert < work.count; expert += kRowThreads) {
    int tile = 0;
    for (int before = 0; before < expert; ++before) tile += LoadShared<int>(4 * before);
    const int end = tile + LoadShared<int>(4 * expert);
    int slot = tile * work.tile_rows;
    for (int i = 0; slot < end * work.tile_rows && i < entries; ++i) {
      if (work.experts[i] != expert) continue;
      work.row_slots[i] = slot;
      work.slot_rows[slot++] = i / work.chosen;
    }
    for (; slot < end * work.tile_rows; ++slot) work.slot_rows[slot] = 0;
    for (; tile < end; ++tile) work.tile_experts[tile] = expert;
  }
  int used = 0;
  for (int expert = 0; expert < work.count; ++expert) used += LoadShared<int>(4 * expert);
  for (int tile = used + ThreadIndex(); tile < work.tiles; tile += kRowThreads) {
    work.tile_experts[tile] = -1;
    for (int i = 0; i < work.tile_rows; ++i) work.slot_rows[tile * work.tile_rows + i] = 0;
  }
}

// ---- values

inline LaunchShape ShapeOf(const MixWork& work) {
  return ValuesShape(work.rows * work.width);
}
KVANTA_DEVICE void RunBlock(const MixWork& work) {
  ForValues(work.rows * work.width, [&](int64_t index) {
    const int64_t row = index / work.width;
    float sum = 0;
    for (int i = 0; i < work.chosen; ++i) {
      const float weight = work.weights[row * work.chosen + i];
      if (weight == 0) continue;
      sum += work.made[work.row_slots[row * work.chosen + i] * work.width + index % work.width] * weight;
    }
    work.out[index] = sum;
  });
}

}  // namespace kvanta::kernels::cuda
