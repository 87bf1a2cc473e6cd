// An MoE layer on an emulated and, if present, a real GPU: the weighted sum of its experts' linear layers, with bits
// that do not depend on the number of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "emulated/gpus.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/expert_routing.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

constexpr int kHidden = 32;
constexpr int kIntermediateSize = 40;

class GpuExpertsTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    Start(GetParam());
    if (gpu_ != nullptr) ops_ = MakeGpuOps(gpu_, std::make_shared<ThreadPool>(1));
  }

  ExpertWeights MakeExpert(WeightType store, uint32_t seed, bool has_bias = false) {
    const auto make = [&](int64_t out, int64_t in, uint32_t w_seed) {
      const std::vector<float> w = RandomValues(out * in, w_seed);
      const weights::WeightView view{.data = w.data(), .dtype = DType::kF32, .out = out, .in = in};
      return ops_->MakeLinear({&view, 1}, has_bias ? RandomValues(out, w_seed + 7) : std::vector<float>{}, store);
    };
    return {.gate_up = make(2 * kIntermediateSize, kHidden, seed), .down = make(kHidden, kIntermediateSize, seed + 1)};
  }
  std::vector<float> Forward(ExpertLayer& layer, const Buffer& x, const Buffer& logits, int count, int64_t first,
                             int64_t rows) {
    const Buffer out = Upload(std::vector<float>(static_cast<size_t>(rows * kHidden), NAN));
    layer.Forward(x.as<float>() + first * kHidden, logits.as<float>() + first * count, rows, out.as<float>());
    return Download(out);
  }

  std::unique_ptr<Ops> ops_;
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuExpertsTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

struct ExpertCase {
  MoeConfig moe;
  WeightType store;
  int64_t rows;
};
const ExpertCase kExpertCases[] = {
    {{.num_experts = 7, .num_experts_per_tok = 3, .routed_scaling_factor = 1.5F},
     WeightType::kBf16,
     40},  // tiles of 32 rows; few rows: tiles of 8
#ifndef KVANTA_SANITIZED
    {{.num_experts = 12, .num_experts_per_tok = 4, .n_group = 4, .topk_group = 2}, WeightType::kInt4, 9},
    {{.num_experts = 64,
      .num_experts_per_tok = 6,
      .n_group = 8,
      .topk_group = 3,
      .scoring_func = ScoringFunc::kSigmoid,
      .norm_topk_prob = true,
      .routed_scaling_factor = 2.5F},
     WeightType::kInt8,
     20},
    {{.num_experts = 5, .num_experts_per_tok = 2}, WeightType::kF32, 530},  // more rows than one pass takes
    {{.num_experts = 3, .num_experts_per_tok = 3}, WeightType::kF16, 33},   // every row goes to every expert
    {{.num_experts = 6, .num_experts_per_tok = 2, .activation = Activation::kSwigluOai, .bias = true},
     WeightType::kF32,
     21},
    {{.num_experts = 5,
      .num_experts_per_tok = 1,
      .scoring_func = ScoringFunc::kSigmoid,
      .apply_router_weight_on_input = true},
     WeightType::kF32,
     30},
    {{.num_experts = 8, .num_experts_per_tok = 3, .has_expert_scales = true}, WeightType::kInt8, 12},
    {{.num_experts = 9,
      .num_experts_per_tok = 4,
      .activation_limit = 0.5F,
      .limits_gate = true,
      .scoring_func = ScoringFunc::kSqrtSoftplus,
      .has_correction_bias = true,
      .norm_topk_prob = true},
     WeightType::kF32,
     15},
    {{.num_experts = 40,
      .num_experts_per_tok = 2,
      .scoring_func = ScoringFunc::kSparseMixer,
      .router_jitter_noise = 0.2F},
     WeightType::kBf16,
     16},
#endif
    {{.num_experts = 4,
      .num_experts_per_tok = 2,
      .activation = Activation::kSwigluOai,
      .bias = true,
      .has_expert_scales = true},
     WeightType::kBf16,
     23},
};

TEST_P(GpuExpertsTest, MatchesTheSumOfItsExpertsForAnyRowCount) {
  uint32_t seed = 1;
  for (const auto& [moe, store, rows] : kExpertCases) {
    SCOPED_TRACE(::testing::Message() << moe.num_experts_per_tok << " of " << moe.num_experts << ", " << rows
                                      << " rows");
    const std::vector<float> x = RandomValues(rows * kHidden, seed),
                             logits = RandomValues(rows * moe.num_experts, seed + 1);
    const std::vector<float> e_score_correction_bias =
        moe.scoring_func == ScoringFunc::kSigmoid || moe.has_correction_bias ? RandomValues(moe.num_experts, seed + 2)
                                                                             : std::vector<float>{};
    const std::vector<float> scales =
        moe.has_expert_scales ? RandomValues(moe.num_experts, seed + 3) : std::vector<float>{};
    const Buffer device_x = Upload(x), device_logits = Upload(logits);
    seed += 3;
    std::vector<ExpertWeights> experts;
    std::vector<double> expected(x.size()), magnitudes(x.size());
    std::vector<std::vector<double>> weights;
    for (int64_t row = 0; row < rows; ++row) {
      weights.push_back(RoutingWeights(logits.data() + row * moe.num_experts, e_score_correction_bias, moe));
      ASSERT_EQ(std::count_if(weights.back().begin(), weights.back().end(), [](double w) { return w != 0; }),
                moe.num_experts_per_tok);
      for (size_t i = 0; i < scales.size(); ++i) weights.back()[i] *= double{scales[i]};
    }
    for (int expert = 0; expert < moe.num_experts; ++expert, seed += 2) {
      experts.push_back(MakeExpert(store, seed, moe.bias));
      const Buffer gate_up = Upload(std::vector<float>(static_cast<size_t>(rows * 2 * kIntermediateSize)));
      const Buffer gated = Upload(std::vector<float>(static_cast<size_t>(rows * kIntermediateSize))),
                   expert_out = Upload(x);
      std::vector<float> inputs = x;
      if (moe.apply_router_weight_on_input) {
        for (size_t i = 0; i < x.size(); ++i) {
          inputs[i] *= static_cast<float>(weights[i / kHidden][static_cast<size_t>(expert)]);
        }
      }
      const Buffer device_inputs = Upload(inputs);
      experts.back().gate_up->Forward(device_inputs.as<float>(), rows, gate_up.as<float>(), 2 * kIntermediateSize);
      if (moe.limits_gate) {
        ops_->CutOffAbove(gate_up.as<float>(), 2 * kIntermediateSize, rows, kIntermediateSize, moe.activation_limit);
      }
      ops_->ActivateMul(moe.activation, moe.activation_limit, gate_up.as<float>(), rows, kIntermediateSize,
                        gated.as<float>(), nullptr);
      experts.back().down->Forward(gated.as<float>(), rows, expert_out.as<float>(), kHidden);
      const std::vector<float> own = Download(expert_out);
      for (size_t i = 0; i < own.size(); ++i) {
        const double weight = weights[i / kHidden][static_cast<size_t>(expert)];
        const double part = double{own[i]} * (moe.apply_router_weight_on_input && weight != 0 ? 1 : weight);
        expected[i] += part;
        magnitudes[i] += std::abs(part);
      }
    }
    const std::unique_ptr<ExpertLayer> layer = ops_->MakeExperts(
        std::move(experts), moe, {.e_score_correction_bias = e_score_correction_bias, .per_expert_scale = scales}, {});
    const std::vector<float> found = Forward(*layer, device_x, device_logits, moe.num_experts, 0, rows);
    for (size_t i = 0; i < found.size(); ++i) {
      double magnitude = magnitudes[i];
      if (moe.apply_router_weight_on_input) {  // an input's error is in each of the sums, which may cancel
        const auto row = magnitudes.begin() + static_cast<int64_t>(i) / kHidden * kHidden;
        magnitude = 8 * *std::max_element(row, row + kHidden);
      }
      ASSERT_NEAR(found[i], expected[i], testing::kGpuRowTolerance * magnitude + 1e-30) << "row " << i / kHidden;
    }
    for (int64_t first = 0; first < std::min<int64_t>(rows, 45);) {  // batches of growing size
      const int64_t count = std::min(1 + first / 3, rows - first);
      const std::vector<float> some = Forward(*layer, device_x, device_logits, moe.num_experts, first, count);
      for (size_t i = 0; i < some.size(); ++i) {
        ASSERT_EQ(some[i], found[static_cast<size_t>(first * kHidden) + i])
            << "row " << first << " and " << i / kHidden;
      }
      first += count;
    }
  }
}

// Padding rows of a graph bucket may hold NaN.
TEST_P(GpuExpertsTest, NonFiniteRowsDoNotAffectOthers) {
  const MoeConfig moe{.num_experts = 9, .num_experts_per_tok = 2, .n_group = 3, .topk_group = 2};
  constexpr int64_t kRows = 4;
  const std::vector<float> x = RandomValues(kRows * kHidden, 90);
  std::vector<float> logits = RandomValues(kRows * moe.num_experts, 91);
  std::vector<ExpertWeights> experts;
  for (int expert = 0; expert < moe.num_experts; ++expert) {
    experts.push_back(MakeExpert(WeightType::kBf16, static_cast<uint32_t>(100 + 2 * expert)));
  }
  const std::unique_ptr<ExpertLayer> layer = ops_->MakeExperts(std::move(experts), moe, {}, {});
  const Buffer device_x = Upload(x);
  const std::vector<float> clean = Forward(*layer, device_x, Upload(logits), moe.num_experts, 0, kRows);
  logits[static_cast<size_t>(moe.num_experts) + 3] = NAN;
  std::fill_n(logits.begin() + 2 * moe.num_experts, moe.num_experts, NAN);
  const std::vector<float> dirty = Forward(*layer, device_x, Upload(logits), moe.num_experts, 0, kRows);
  for (size_t i = 0; i < clean.size(); ++i) {
    if (i / kHidden == 1 || i / kHidden == 2) {
      EXPECT_TRUE(std::isnan(dirty[i])) << i;
    } else {
      EXPECT_EQ(dirty[i], clean[i]) << i;
    }
  }
}

// Sigmoids of large logits are all 1: the larger logit is chosen all the same, as on the CPU.
TEST_P(GpuExpertsTest, ChoosesByLogitsWithoutACorrection) {
  const MoeConfig moe{.num_experts = 4, .num_experts_per_tok = 1, .scoring_func = ScoringFunc::kSigmoid};
  std::vector<ExpertWeights> experts;
  for (uint32_t expert = 0; expert < 4; ++expert) experts.push_back(MakeExpert(WeightType::kBf16, 100 + 2 * expert));
  const std::unique_ptr<ExpertLayer> layer = ops_->MakeExperts(std::move(experts), moe, {}, {});
  const Buffer x = Upload(RandomValues(kHidden, 92));
  const auto found = [&](std::vector<float> logits) { return Forward(*layer, x, Upload(logits), 4, 0, 1); };
  EXPECT_EQ(found({40, 30, 50, 45}), found({0, 0, 90, 0}));
}

}  // namespace
}  // namespace kvanta::kernels
