// A mixture of experts: a router chooses some of many small MLPs for each row; one for all rows stands beside them.
// Rows of an expert go through it together. A row's sum goes over its experts in ascending order, so that it does not
// depend on the other rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "models/layer_blocks.h"

namespace kvanta::models {
namespace {

// Indices of the `count` largest of x[n], in ascending order; of equals the first. `order`: room for n.
void ChooseLargest(const float* x, int n, int count, int* order) noexcept {
  std::iota(order, order + n, 0);
  std::partial_sort(order, order + count, order + n,
                    [x](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
  std::sort(order, order + count);
}

class Experts final : public MlpBlock {
 public:
  Experts(const BlockSource& source, const std::string& module)
      : ops_(source.ops), config_(source.config), experts_(source.config.experts) {
    const auto count = static_cast<size_t>(experts_.count);
    // Always in f32: a small error would choose other experts.
    router_ =
        source.reader.Linear({{module + "gate", experts_.count}}, config_.hidden, false, kernels::WeightType::kF32);
    if (experts_.sigmoid) {
      correction_ = source.reader.Values(module + "gate.e_score_correction_bias", experts_.count);
    }
    if (ops_.OnHost()) {
      for (int expert = 0; expert < experts_.count; ++expert) {
        mlps_.push_back(ReadGatedMlp(source, ExpertName(module, expert), experts_.intermediate_size, false));
      }
    } else {
      ReadLayer(source, module);
    }
    if (experts_.shared != 0) {
      shared_ = ReadGatedMlp(source, module + "shared_experts.", int64_t{experts_.shared} * experts_.intermediate_size,
                             config_.mlp_bias);
    }
    score_.resize(count);
    choice_.resize(count);
    order_.resize(count);
    group_score_.resize(static_cast<size_t>(experts_.groups));
    group_order_.resize(static_cast<size_t>(experts_.groups));
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    logits_ = scratch.Take(rows * experts_.count);
    made_ = scratch.Take(rows * config_.hidden);
    if (!layer_) {
      weights_ = scratch.Take(rows * experts_.count);
      gathered_ = scratch.Take(rows * config_.hidden);
      for (const auto& mlp : mlps_) scratch.OverlapScratch(*mlp, rows);
    }
    if (shared_) scratch.OverlapScratch(*shared_, rows);
  }

  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    router_->Forward(x, rows, logits_, experts_.count);
    if (layer_) {
      layer_->Forward(x, logits_, rows, out);
    } else {
      for (int64_t row = 0; row < rows; ++row) Route(logits_ + row * experts_.count, weights_ + row * experts_.count);
      std::fill_n(out, rows * config_.hidden, 0.0F);
      for (int expert = 0; expert < experts_.count; ++expert) AddExpert(expert, x, rows, out);
    }
    if (!shared_) return;
    shared_->Forward(x, rows, made_);
    ops_.Add(out, made_, rows * config_.hidden);
  }

 private:
  static std::string ExpertName(const std::string& module, int expert) {
    return module + "experts." + std::to_string(expert) + ".";
  }

  void ReadLayer(const BlockSource& source, const std::string& module) {
    std::vector<kernels::ExpertWeights> weights;
    for (int expert = 0; expert < experts_.count; ++expert) {
      const std::string name = ExpertName(module, expert);
      auto gate_up = source.reader.Linear(
          {{name + "gate_proj", experts_.intermediate_size}, {name + "up_proj", experts_.intermediate_size}},
          config_.hidden, false, source.store);
      auto down =
          source.reader.Linear({{name + "down_proj", config_.hidden}}, experts_.intermediate_size, false, source.store);
      weights.push_back({.gate_up = std::move(gate_up), .down = std::move(down)});
    }
    const kernels::ExpertRule rule{.count = experts_.count,
                                   .chosen = experts_.chosen,
                                   .groups = experts_.groups,
                                   .topk_group = experts_.topk_group,
                                   .sigmoid = experts_.sigmoid,
                                   .normalized = experts_.normalized,
                                   .scale = static_cast<float>(experts_.scale)};
    layer_ = ops_.MakeExperts(std::move(weights), rule, correction_);
  }

  void AddExpert(int expert, const float* x, int64_t rows, float* out) noexcept {
    const int64_t hidden = config_.hidden;
    const float* weights = weights_ + expert;
    int64_t chosen = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (weights[row * experts_.count] == 0) continue;
      ops_.Copy(x + row * hidden, hidden, 1, hidden, gathered_ + chosen * hidden, hidden);
      ++chosen;
    }
    if (chosen == 0) return;
    mlps_[static_cast<size_t>(expert)]->Forward(gathered_, chosen, made_);
    const float* from = made_;
    for (int64_t row = 0; row < rows; ++row) {
      const float weight = weights[row * experts_.count];
      if (weight == 0) continue;
      for (int64_t i = 0; i < hidden; ++i) out[row * hidden + i] += from[i] * weight;
      from += hidden;
    }
  }

  // Weights of a row's experts, [count], 0 of those that are not chosen.
  void Route(const float* logits, float* weights) noexcept {
    const int count = experts_.count;
    Score(logits);
    for (int i = 0; i < count; ++i) choice_[i] = score_[i] + (experts_.sigmoid ? correction_[i] : 0.0F);
    if (experts_.groups > 1) KeepBestGroups();
    ChooseLargest(choice_.data(), count, experts_.chosen, order_.data());
    float sum = 0;
    for (int i = 0; i < experts_.chosen; ++i) sum += score_[order_[i]];
    const float scale = static_cast<float>(experts_.scale);
    std::fill_n(weights, count, 0.0F);
    for (int i = 0; i < experts_.chosen; ++i) {
      const float score = score_[order_[i]];
      weights[order_[i]] = (experts_.normalized ? score / (sum + 1e-20F) : score) * scale;
    }
  }

  void Score(const float* logits) noexcept {
    const int count = experts_.count;
    if (experts_.sigmoid) {
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

  // Groups by their best expert, or by the sum of the two best (V3); experts of the others are out.
  void KeepBestGroups() noexcept {
    const int size = experts_.count / experts_.groups;
    for (int group = 0; group < experts_.groups; ++group) {
      float best = -std::numeric_limits<float>::infinity(), second = best;
      for (int i = group * size; i < (group + 1) * size; ++i) {
        if (choice_[i] > best) {
          second = best;
          best = choice_[i];
        } else {
          second = std::max(second, choice_[i]);
        }
      }
      group_score_[group] = experts_.sigmoid ? best + second : best;
    }
    ChooseLargest(group_score_.data(), experts_.groups, experts_.topk_group, group_order_.data());
    int next = 0;
    for (int group = 0; group < experts_.groups; ++group) {
      if (next < experts_.topk_group && group_order_[next] == group) {
        ++next;
        continue;
      }
      std::fill_n(choice_.begin() + group * size, size, -std::numeric_limits<float>::infinity());
    }
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const MoeConfig& experts_;
  std::unique_ptr<kernels::Linear> router_;      // hidden -> count
  std::vector<float> correction_;                // [count], added to the scores that choose
  std::unique_ptr<kernels::ExpertLayer> layer_;  // on a device whose memory is not the host's; else
  std::vector<std::unique_ptr<MlpBlock>> mlps_;  // one by one
  std::unique_ptr<MlpBlock> shared_;
  // f32 [rows][...]:
  float* logits_ = nullptr;    // count
  float* weights_ = nullptr;   // count
  float* gathered_ = nullptr;  // hidden: rows of one expert
  float* made_ = nullptr;      // hidden
  // Of one row:
  std::vector<float> score_, choice_, group_score_;
  std::vector<int> order_, group_order_;
};

}  // namespace

std::unique_ptr<MlpBlock> ReadExperts(const BlockSource& source, const std::string& module) {
  return std::make_unique<Experts>(source, module);
}

}  // namespace kvanta::models
