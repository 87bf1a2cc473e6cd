// Routing of rows to experts, in doubles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "kernels/moe/moe_layer.h"

namespace kvanta::kernels {

// SparseMixer: each expert's weight is its share of the exponentials of the logits that are close to its own, without
// those of the experts before it.
inline std::vector<double> SparseMixerWeights(const float* logits, const MoeConfig& moe) {
  const auto count = static_cast<size_t>(moe.num_experts);
  std::vector<double> left(logits, logits + count), weights(count);
  for (int chosen = 0; chosen < 2; ++chosen) {
    const auto best = static_cast<size_t>(std::max_element(left.begin(), left.end()) - left.begin());
    double sum = 0;
    for (size_t i = 0; i < count; ++i) {
      const double distance = left[best] - double{logits[i]};
      const bool is_close =
          distance / std::max(std::abs(double{logits[i]}), left[best]) <= 2 * double{moe.router_jitter_noise};
      if (is_close) sum += std::exp(left[i] - left[best]);
    }
    weights[best] = 1 / sum;
    left[best] = -HUGE_VAL;
  }
  return weights;
}

// Weights of a row's experts, 0 for those that are not chosen: the rule of kernels/moe/moe_layer.h in doubles.
inline std::vector<double> RoutingWeights(const float* logits, const std::vector<float>& e_score_correction_bias,
                                          const MoeConfig& moe) {
  if (moe.scoring_func == ScoringFunc::kSparseMixer) return SparseMixerWeights(logits, moe);
  const auto count = static_cast<size_t>(moe.num_experts);
  std::vector<double> scores(count), weights(count);
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double x = double{logits[i]};
    scores[i] = moe.scoring_func == ScoringFunc::kSigmoid        ? 1 / (1 + std::exp(-x))
                : moe.scoring_func == ScoringFunc::kSqrtSoftplus ? std::sqrt(std::log1p(std::exp(x)))
                                                                 : std::exp(x);
    sum += scores[i];
  }
  if (moe.scoring_func == ScoringFunc::kSoftmax) {
    for (double& score : scores) score /= sum;
  }
  std::vector<double> choices = scores;
  for (size_t i = 0; i < e_score_correction_bias.size(); ++i) choices[i] += double{e_score_correction_bias[i]};
  const auto best = [](const std::vector<double>& values, int requested) {
    std::vector<size_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
    order.resize(static_cast<size_t>(requested));
    return order;
  };
  const size_t size = count / static_cast<size_t>(moe.n_group);
  std::vector<double> groups;
  for (size_t first = 0; first < count; first += size) {
    std::vector<double> group_choices(choices.begin() + static_cast<int64_t>(first),
                                      choices.begin() + static_cast<int64_t>(first + size));
    std::sort(group_choices.rbegin(), group_choices.rend());
    groups.push_back(group_choices[0] + (moe.scoring_func == ScoringFunc::kSigmoid ? group_choices[1] : 0));
  }
  const std::vector<size_t> kept = best(groups, moe.topk_group);
  for (size_t i = 0; i < count; ++i) {
    if (std::find(kept.begin(), kept.end(), i / size) == kept.end()) choices[i] = -HUGE_VAL;
  }
  double total = 0;
  for (const size_t expert : best(choices, moe.num_experts_per_tok)) total += weights[expert] = scores[expert];
  for (double& weight : weights) weight *= double{moe.routed_scaling_factor} / (moe.norm_topk_prob ? total : 1);
  return weights;
}

}  // namespace kvanta::kernels
