// A mixture of experts: its configuration, the arithmetic of routing that host and device share, and the interface of a
// layer of routed experts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/host_device.h"
#include "kernels/activation.h"
#include "kernels/linear/linear.h"
#include "parallel/communicator.h"

namespace kvanta::kernels {

enum class ScoringFunc : uint8_t {
  kSoftmax,
  kSigmoid,
  kSqrtSoftplus,  // sqrt(log(1 + exp(x)))
  kSparseMixer,   // two experts, each by a softmax over the logits close to its own, the first one's left out
};

// A mixture of experts, under the names of Hugging Face's configs.
struct MoeConfig {
  int32_t num_experts = 0;            // routed experts (n_routed_experts); 0: none
  int32_t num_experts_per_tok = 0;    // routed experts of one row
  int32_t moe_intermediate_size = 0;  // width of one expert
  int32_t moe_latent_size = 0;        // width of the rows of routed experts, projected to it and back; 0: the model's
  // Width of the MLP that every row passes in addition (all shared experts in one); 0: none.
  int32_t shared_expert_intermediate_size = 0;
  bool shared_expert_gate = false;  // its output is multiplied by the sigmoid of a linear layer of the row
  bool gated = true;                // else experts are down(max(up(x), 0)^2)
  Activation activation = Activation::kSilu;
  float activation_limit = 0;  // of kSilu (Ops::ActivateMul); 0: none
  bool limits_gate = false;    // the gate is cut off above activation_limit before kSilu, too
  int32_t n_group = 1;         // groups of consecutive experts
  int32_t topk_group = 1;      // groups that a row's experts are chosen from: the best
  // Sigmoid scores are chosen after e_score_correction_bias is added, their groups by the sum of the two best
  // (DeepSeek V3); softmax scores as they are, their groups by the best (V2).
  ScoringFunc scoring_func = ScoringFunc::kSoftmax;
  float router_jitter_noise = 0;     // of kSparseMixer: half the relative distance up to which logits are close
  bool has_correction_bias = false;  // e_score_correction_bias; without it, experts are chosen by their logits
  bool norm_topk_prob = false;       // weights are divided by the chosen scores' sum
  float norm_topk_eps = 1e-20F;      // ... and this
  float routed_scaling_factor = 1;
  bool apply_router_weight_on_input = false;  // an expert's input is multiplied by the weight, not its output (Llama 4)
  bool bias = false;                          // router and experts have a bias (GPT-OSS)
  bool has_expert_scales = false;             // factors of the experts' weights, after the choice (Gemma 4)

  bool operator==(const MoeConfig&) const = default;
};

// Vectors of a router in addition to its matrix: [num_experts] each, or empty (MoeConfig says which).
struct RouterVectors {
  std::span<const float> e_score_correction_bias = {};
  std::span<const float> per_expert_scale = {};
};

// Order of the top-k choice: by score, among equals by index.
KVANTA_HD constexpr bool RanksBefore(float a_score, int a, float b_score, int b) noexcept {
  return a_score > b_score || (a_score == b_score && a < b);
}

// Score of a group with these two largest scores.
KVANTA_HD constexpr float GroupScore(const MoeConfig& moe, float best, float second) noexcept {
  return moe.scoring_func == ScoringFunc::kSigmoid ? best + second : best;
}

// Weight of an expert's output; `sum`: of the chosen experts' scores.
KVANTA_HD constexpr float RoutingWeight(const MoeConfig& moe, float score, float sum) noexcept {
  return (moe.norm_topk_prob ? score / (sum + moe.norm_topk_eps) : score) * moe.routed_scaling_factor;
}

// One expert: down(activation(gate(x)) * up(x)), or without a gate, of a device's linear layers.
struct ExpertWeights {
  std::unique_ptr<Linear> gate_up;  // hidden -> gate | up; without a gate: -> up
  std::unique_ptr<Linear> down;     // -> hidden
};

// Division of a layer of experts among ranks. By default each rank has a part of every matrix's outputs, as in other
// linear layers; gated activations and the layer's output are gathered.
struct ExpertDivision {
  parallel::Communicator* ranks = nullptr;  // null: this process has all
  // Each rank has some of the experts instead (parallel::Partition), and the outputs of all are gathered before they
  // are summed: for expert parallelism.
  bool by_experts = false;

  bool Divided() const noexcept { return ranks != nullptr && !ranks->IsSingleRank(); }
};

class ExpertLayer {
 public:
  virtual ~ExpertLayer() = default;
  // out[r] = sum over the top-k experts of logits[r], in ascending order, of their outputs for x[r] times their
  // weights. x, out: f32 [rows][hidden]; logits: f32 [rows][num_experts]. A row's result does not depend on `rows`.
  virtual void Forward(const float* x, const float* logits, int64_t rows, float* out) noexcept = 0;
};

}  // namespace kvanta::kernels
