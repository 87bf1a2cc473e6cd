// Mixture of experts: a router chooses some of many small MLPs for each row; shared experts serve all rows. Rows of one
// expert are multiplied together. A row sums its experts in ascending order, so that its bits do not depend on the
// other rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "models/layer_blocks.h"

namespace kvanta::models {
namespace {

// Top-k: indices of the `count` first of x[n] by RanksBefore, in ascending order. `order`: workspace [n].
void TopK(const float* x, int n, int count, int* order) noexcept {
  std::iota(order, order + n, 0);
  std::partial_sort(order, order + count, order + n,
                    [x](int a, int b) { return kernels::RanksBefore(x[a], a, x[b], b); });
  std::sort(order, order + count);
}

class MixtureOfExperts final : public MlpBlock {
 public:
  MixtureOfExperts(const BlockSource& source, const std::string& module)
      : ops_(source.ops), config_(source.config), moe_(source.config.moe) {
    const auto count = static_cast<size_t>(moe_.num_experts);
    // The router stays f32: a small error would choose other experts.
    router_ =
        source.reader.Linear({{module + "gate", moe_.num_experts}}, config_.hidden, false, kernels::WeightType::kF32);
    if (IsSigmoid()) {
      e_score_correction_bias_ = source.reader.Values(module + "gate.e_score_correction_bias", moe_.num_experts);
    }
    if (ops_.OnHost()) {
      for (int expert = 0; expert < moe_.num_experts; ++expert) {
        mlps_.push_back(ReadGatedMlp(source, ExpertName(module, expert), moe_.moe_intermediate_size, false));
      }
    } else {
      ReadDeviceLayer(source, module);
    }
    if (moe_.num_shared_experts != 0) {
      shared_ = ReadGatedMlp(source, module + "shared_experts.",
                             int64_t{moe_.num_shared_experts} * moe_.moe_intermediate_size, config_.mlp.bias);
    }
    score_.resize(count);
    choice_score_.resize(count);
    order_.resize(count);
    group_score_.resize(static_cast<size_t>(moe_.n_group));
    group_order_.resize(static_cast<size_t>(moe_.n_group));
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    logits_ = scratch.Take(rows * moe_.num_experts);
    outputs_ = scratch.Take(rows * config_.hidden);
    if (!layer_) {
      weights_ = scratch.Take(rows * moe_.num_experts);
      gathered_ = scratch.Take(rows * config_.hidden);
      for (const auto& mlp : mlps_) scratch.OverlapScratch(*mlp, rows);
    }
    if (shared_) scratch.OverlapScratch(*shared_, rows);
  }

  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    router_->Forward(x, rows, logits_, moe_.num_experts);
    if (layer_) {
      layer_->Forward(x, logits_, rows, out);
    } else {
      for (int64_t row = 0; row < rows; ++row)
        ComputeWeights(logits_ + row * moe_.num_experts, weights_ + row * moe_.num_experts);
      std::fill_n(out, rows * config_.hidden, 0.0F);
      for (int expert = 0; expert < moe_.num_experts; ++expert) AddExpert(expert, x, rows, out);
    }
    if (!shared_) return;
    shared_->Forward(x, rows, outputs_);
    ops_.Add(out, outputs_, rows * config_.hidden);
  }

 private:
  bool IsSigmoid() const noexcept { return moe_.scoring_func == kernels::ScoringFunc::kSigmoid; }
  static std::string ExpertName(const std::string& module, int expert) {
    return module + "experts." + std::to_string(expert) + ".";
  }

  void ReadDeviceLayer(const BlockSource& source, const std::string& module) {
    std::vector<kernels::ExpertWeights> weights;
    for (int expert = 0; expert < moe_.num_experts; ++expert) {
      const std::string name = ExpertName(module, expert);
      auto gate_up = source.reader.Linear(
          {{name + "gate_proj", moe_.moe_intermediate_size}, {name + "up_proj", moe_.moe_intermediate_size}},
          config_.hidden, false, source.store);
      auto down =
          source.reader.Linear({{name + "down_proj", config_.hidden}}, moe_.moe_intermediate_size, false, source.store);
      weights.push_back({.gate_up = std::move(gate_up), .down = std::move(down)});
    }
    layer_ = ops_.MakeExperts(std::move(weights), moe_, e_score_correction_bias_);
  }

  void AddExpert(int expert, const float* x, int64_t rows, float* out) noexcept {
    const int64_t hidden = config_.hidden;
    const float* weights = weights_ + expert;
    int64_t expert_rows = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (weights[row * moe_.num_experts] == 0) continue;
      ops_.Copy(x + row * hidden, hidden, 1, hidden, gathered_ + expert_rows * hidden, hidden);
      ++expert_rows;
    }
    if (expert_rows == 0) return;
    mlps_[static_cast<size_t>(expert)]->Forward(gathered_, expert_rows, outputs_);
    const float* from = outputs_;
    for (int64_t row = 0; row < rows; ++row) {
      const float weight = weights[row * moe_.num_experts];
      if (weight == 0) continue;
      for (int64_t i = 0; i < hidden; ++i) out[row * hidden + i] += from[i] * weight;
      from += hidden;
    }
  }

  // weights [num_experts]: 0 for experts that are not chosen.
  void ComputeWeights(const float* logits, float* weights) noexcept {
    const int count = moe_.num_experts;
    ComputeScores(logits);
    for (int i = 0; i < count; ++i) choice_score_[i] = score_[i] + (IsSigmoid() ? e_score_correction_bias_[i] : 0.0F);
    if (moe_.n_group > 1) KeepBestGroups();
    TopK(choice_score_.data(), count, moe_.num_experts_per_tok, order_.data());
    float sum = 0;
    for (int i = 0; i < moe_.num_experts_per_tok; ++i) sum += score_[order_[i]];
    std::fill_n(weights, count, 0.0F);
    for (int i = 0; i < moe_.num_experts_per_tok; ++i) {
      weights[order_[i]] = RoutingWeight(moe_, score_[order_[i]], sum);
    }
  }

  void ComputeScores(const float* logits) noexcept {
    const int count = moe_.num_experts;
    if (IsSigmoid()) {
      for (int i = 0; i < count; ++i) score_[i] = 1.0F / (1.0F + std::exp(-logits[i]));
      return;
    }
    const float limit = *std::max_element(logits, logits + count);
    float sum = 0;
    for (int i = 0; i < count; ++i) {
      score_[i] = std::exp(logits[i] - limit);
      sum += score_[i];
    }
    for (int i = 0; i < count; ++i) score_[i] /= sum;
  }

  // Excludes the experts outside the topk_group best groups.
  void KeepBestGroups() noexcept {
    const int size = moe_.num_experts / moe_.n_group;
    for (int group = 0; group < moe_.n_group; ++group) {
      float best = -std::numeric_limits<float>::infinity(), second = best;
      for (int i = group * size; i < (group + 1) * size; ++i) {
        if (choice_score_[i] > best) {
          second = best;
          best = choice_score_[i];
        } else {
          second = std::max(second, choice_score_[i]);
        }
      }
      group_score_[group] = GroupScore(moe_, best, second);
    }
    TopK(group_score_.data(), moe_.n_group, moe_.topk_group, group_order_.data());
    int next = 0;
    for (int group = 0; group < moe_.n_group; ++group) {
      if (next < moe_.topk_group && group_order_[next] == group) {
        ++next;
        continue;
      }
      std::fill_n(choice_score_.begin() + group * size, size, -std::numeric_limits<float>::infinity());
    }
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const kernels::MoeConfig& moe_;
  std::unique_ptr<kernels::Linear> router_;      // hidden -> num_experts
  std::vector<float> e_score_correction_bias_;   // [num_experts], added to the scores that choose; else empty
  std::unique_ptr<kernels::ExpertLayer> layer_;  // all routed experts, where routing happens on the device
  std::vector<std::unique_ptr<MlpBlock>> mlps_;  // the routed experts, where it happens on the host
  std::unique_ptr<MlpBlock> shared_;             // null: no shared experts
  // Scratch, f32 [rows][...]:
  float* logits_ = nullptr;    // num_experts
  float* weights_ = nullptr;   // num_experts
  float* gathered_ = nullptr;  // hidden: rows of one expert
  float* outputs_ = nullptr;   // hidden: outputs of one expert, then of the shared ones
  // One row's scores, and the scores that choose:
  std::vector<float> score_, choice_score_, group_score_;
  std::vector<int> order_, group_order_;
};

}  // namespace

std::unique_ptr<MlpBlock> ReadMoe(const BlockSource& source, const std::string& module) {
  return std::make_unique<MixtureOfExperts>(source, module);
}

}  // namespace kvanta::models
