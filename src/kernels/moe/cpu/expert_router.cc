#include "kernels/moe/cpu/expert_router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace kvanta::kernels {
namespace {

constexpr float kLowestScore = -std::numeric_limits<float>::infinity();

// Top-k: indices of the `count` first of x[n] by RanksBefore, in ascending order. NaN values choose some indices, too.
void TopK(const float* x, int n, int count, int32_t* indices) noexcept {
  int found = 0;  // the best so far, by rank
  for (int i = 0; i < n; ++i) {
    int at = found;
    while (at > 0 && RanksBefore(x[i], i, x[indices[at - 1]], indices[at - 1])) --at;
    if (at == count) continue;
    found = std::min(found + 1, count);
    std::copy_backward(indices + at, indices + found - 1, indices + found);
    indices[at] = i;
  }
  std::sort(indices, indices + count);
}

}  // namespace

ExpertRouter::ExpertRouter(const MoeConfig& moe, const RouterVectors& router)
    : moe_(moe),
      e_score_correction_bias_(router.e_score_correction_bias.begin(), router.e_score_correction_bias.end()),
      per_expert_scale_(router.per_expert_scale.begin(), router.per_expert_scale.end()),
      scores_(static_cast<size_t>(moe.num_experts)),
      choices_(static_cast<size_t>(moe.num_experts)),
      group_scores_(static_cast<size_t>(moe.n_group)),
      groups_(static_cast<size_t>(moe.topk_group)) {}

void ExpertRouter::Route(const float* logits, int32_t* experts, float* weights) noexcept {
  if (moe_.scoring_func == ScoringFunc::kSparseMixer) return RouteSparseMixer(logits, experts, weights);
  ComputeScores(logits);
  // Without a correction the order of the logits is that of the scores, but for scores that are rounded to 1 or 0.
  std::copy_n(logits, choices_.size(), choices_.begin());
  for (size_t i = 0; i < e_score_correction_bias_.size(); ++i) choices_[i] = scores_[i] + e_score_correction_bias_[i];
  if (moe_.n_group > 1) {
    if (e_score_correction_bias_.empty()) choices_ = scores_;
    KeepBestGroups();
  }
  TopK(choices_.data(), moe_.num_experts, moe_.num_experts_per_tok, experts);
  float sum = 0;
  for (int i = 0; i < moe_.num_experts_per_tok; ++i) sum += scores_[static_cast<size_t>(experts[i])];
  for (int i = 0; i < moe_.num_experts_per_tok; ++i) {
    weights[i] = RoutingWeight(moe_, scores_[static_cast<size_t>(experts[i])], sum);
    if (!per_expert_scale_.empty()) weights[i] *= per_expert_scale_[static_cast<size_t>(experts[i])];
  }
}

// SparseMixer (arXiv:2409.12136, section 2.1), without its noise.
void ExpertRouter::RouteSparseMixer(const float* logits, int32_t* experts, float* weights) noexcept {
  const size_t count = choices_.size();
  std::copy_n(logits, count, choices_.begin());
  for (int i = 0; i < moe_.num_experts_per_tok; ++i) {
    TopK(choices_.data(), moe_.num_experts, 1, experts + i);
    const float best = choices_[static_cast<size_t>(experts[i])];
    float sum = 0;
    for (size_t expert = 0; expert < count; ++expert) {
      const float scale = std::max(std::abs(logits[expert]), best);
      if ((best - logits[expert]) / scale <= 2 * moe_.router_jitter_noise) sum += std::exp(choices_[expert] - best);
    }
    weights[i] = RoutingWeight(moe_, 1 / sum, 1);
    choices_[static_cast<size_t>(experts[i])] = kLowestScore;
  }
  if (experts[0] > experts[1]) {  // ascending
    std::swap(experts[0], experts[1]);
    std::swap(weights[0], weights[1]);
  }
}

void ExpertRouter::ComputeScores(const float* logits) noexcept {
  const size_t count = scores_.size();
  if (moe_.scoring_func == ScoringFunc::kSigmoid) {
    for (size_t i = 0; i < count; ++i) scores_[i] = 1.0F / (1.0F + std::exp(-logits[i]));
    return;
  }
  if (moe_.scoring_func == ScoringFunc::kSqrtSoftplus) {
    for (size_t i = 0; i < count; ++i) {
      const float x = logits[i];  // -infinity has the score 0
      scores_[i] = std::sqrt(std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x))));
    }
    return;
  }
  const float limit = *std::max_element(logits, logits + count);
  float sum = 0;
  for (size_t i = 0; i < count; ++i) {
    scores_[i] = std::exp(logits[i] - limit);
    sum += scores_[i];
  }
  for (float& score : scores_) score /= sum;
}

// Excludes the experts outside the topk_group best groups.
void ExpertRouter::KeepBestGroups() noexcept {
  const int size = moe_.num_experts / moe_.n_group;
  const auto group_begin = [&](int group) { return choices_.begin() + static_cast<int64_t>(group) * size; };
  for (int group = 0; group < moe_.n_group; ++group) {
    float best = kLowestScore, second = kLowestScore;
    std::for_each(group_begin(group), group_begin(group + 1), [&](float choice) {
      second = std::max(second, std::min(best, choice));
      best = std::max(best, choice);
    });
    group_scores_[static_cast<size_t>(group)] = GroupScore(moe_, best, second);
  }
  TopK(group_scores_.data(), moe_.n_group, moe_.topk_group, groups_.data());
  for (int group = 0; group < moe_.n_group; ++group) {
    if (std::binary_search(groups_.begin(), groups_.end(), group)) continue;
    std::fill(group_begin(group), group_begin(group + 1), kLowestScore);
  }
}

}  // namespace kvanta::kernels
