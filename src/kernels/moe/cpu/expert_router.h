// Routing on the host: the experts of a row and their weights.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/moe/moe_layer.h"

namespace kvanta::kernels {

class ExpertRouter {
 public:
  ExpertRouter(const MoeConfig& moe, const RouterVectors& router);

  // The experts of one row, ascending, and their weights: [num_experts_per_tok]. logits: [num_experts]. Not
  // thread-safe.
  void Route(const float* logits, int32_t* experts, float* weights) noexcept;

 private:
  void RouteSparseMixer(const float* logits, int32_t* experts, float* weights) noexcept;
  void ComputeScores(const float* logits) noexcept;
  void KeepBestGroups() noexcept;

  const MoeConfig moe_;
  const std::vector<float> e_score_correction_bias_, per_expert_scale_;
  // Scores of one row, what its experts are chosen by, and the groups' scores.
  std::vector<float> scores_, choices_, group_scores_;
  std::vector<int32_t> groups_;  // chosen
};

}  // namespace kvanta::kernels
