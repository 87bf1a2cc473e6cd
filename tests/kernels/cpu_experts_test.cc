// A layer of experts on every CPU unit: the weighted sum of its experts' linear layers, with bits that do not depend on
// the number of rows and threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <vector>

#include "emulated/units.h"
#include "kernels/expert_routing.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::Unit;

constexpr int kExpertHidden = 600;  // several blocks of steps of most kernels
constexpr int kExpertWidth = 24;

struct CpuExpertCase {
  MoeConfig moe;
  WeightType store;
  int64_t rows;
};
const CpuExpertCase kCpuExpertCases[] = {
    {{.num_experts = 7, .num_experts_per_tok = 3, .routed_scaling_factor = 1.5F}, WeightType::kBf16, 40},
    {{.num_experts = 128, .num_experts_per_tok = 8, .norm_topk_prob = true}, WeightType::kF32, 150},  // several passes
    {{.num_experts = 32, .num_experts_per_tok = 8}, WeightType::kBf16, 12},
    {{.num_experts = 12, .num_experts_per_tok = 4, .n_group = 4, .topk_group = 2}, WeightType::kInt4, 9},
    {{.num_experts = 16,
      .num_experts_per_tok = 6,
      .n_group = 4,
      .topk_group = 3,
      .scoring_func = ScoringFunc::kSigmoid,
      .has_correction_bias = true,
      .norm_topk_prob = true,
      .routed_scaling_factor = 2.5F},
     WeightType::kInt8,
     20},
    {{.num_experts = 3, .num_experts_per_tok = 3}, WeightType::kF16, 130},   // every row to every expert
    {{.num_experts = 2, .num_experts_per_tok = 1}, WeightType::kF32, 1100},  // more rows than are routed together
    {{.num_experts = 6,
      .num_experts_per_tok = 2,
      .activation = Activation::kSwigluOai,
      .norm_topk_prob = true,
      .bias = true},
     WeightType::kF32,
     21},
    {{.num_experts = 5,
      .num_experts_per_tok = 1,
      .scoring_func = ScoringFunc::kSigmoid,
      .apply_router_weight_on_input = true},
     WeightType::kF32,
     17},
    {{.num_experts = 16,
      .num_experts_per_tok = 2,
      .scoring_func = ScoringFunc::kSparseMixer,
      .router_jitter_noise = 0.2F},
     WeightType::kF32,
     40},
};

class CpuExpertsTest : public ::testing::TestWithParam<Unit> {
 protected:
  struct Expert {
    std::vector<float> gate_up, down, gate_up_bias, down_bias;
  };

  static std::vector<Expert> MakeExperts(const MoeConfig& moe) {
    std::vector<Expert> experts;
    for (int i = 0; i < moe.num_experts; ++i) {
      const auto seed = static_cast<uint32_t>(1000 + 4 * i);
      experts.push_back({.gate_up = RandomValues(2 * kExpertWidth * kExpertHidden, seed),
                         .down = RandomValues(kExpertHidden * kExpertWidth, seed + 1),
                         .gate_up_bias = moe.bias ? RandomValues(2 * kExpertWidth, seed + 2) : std::vector<float>{},
                         .down_bias = moe.bias ? RandomValues(kExpertHidden, seed + 3) : std::vector<float>{}});
    }
    return experts;
  }
  static std::unique_ptr<Linear> Pack(Ops& ops, const std::vector<float>& w, const std::vector<float>& bias,
                                      int64_t out, WeightType store) {
    const weights::WeightView view{
        .data = w.data(), .dtype = DType::kF32, .out = out, .in = static_cast<int64_t>(w.size()) / out};
    return ops.MakeLinear({&view, 1}, bias, store);
  }
  static ExpertWeights Pack(Ops& ops, const Expert& expert, WeightType store) {
    return {.gate_up = Pack(ops, expert.gate_up, expert.gate_up_bias, 2 * kExpertWidth, store),
            .down = Pack(ops, expert.down, expert.down_bias, kExpertHidden, store)};
  }
  static std::unique_ptr<ExpertLayer> MakeLayer(Ops& ops, const std::vector<Expert>& experts, const CpuExpertCase& test,
                                                const std::vector<float>& correction) {
    std::vector<ExpertWeights> weights;
    for (const Expert& expert : experts) weights.push_back(Pack(ops, expert, test.store));
    return ops.MakeExperts(std::move(weights), test.moe, {.e_score_correction_bias = correction}, {});
  }
  static std::vector<float> Forward(ExpertLayer& layer, const std::vector<float>& x, const std::vector<float>& logits,
                                    int experts, int64_t first, int64_t rows) {
    std::vector<float> out(static_cast<size_t>(rows * kExpertHidden), NAN);
    layer.Forward(x.data() + first * kExpertHidden, logits.data() + first * experts, rows, out.data());
    return out;
  }
  std::unique_ptr<Ops> MakeOps(int threads) const {
    return MakeCpuOps(std::make_shared<ThreadPool>(threads), *GetParam().table);
  }
};

INSTANTIATE_TEST_SUITE_P(Units, CpuExpertsTest, ::testing::ValuesIn(testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

TEST_P(CpuExpertsTest, MatchesTheSumOfItsExpertsForAnyRowCount) {
  uint32_t seed = 1;
  for (const CpuExpertCase& test : kCpuExpertCases) {
    const MoeConfig& moe = test.moe;
    SCOPED_TRACE(::testing::Message() << moe.num_experts_per_tok << " of " << moe.num_experts << ", " << test.rows);
    const auto x = RandomValues(test.rows * kExpertHidden, seed++),
               logits = RandomValues(test.rows * moe.num_experts, seed++);
    const auto correction = moe.has_correction_bias ? RandomValues(moe.num_experts, seed++) : std::vector<float>{};
    const std::vector<Expert> experts = MakeExperts(moe);
    const auto ops = MakeOps(1), parallel = MakeOps(3);
    std::vector<double> expected(x.size()), magnitudes(x.size());
    for (int64_t row = 0; row < test.rows; ++row) {
      const std::vector<double> weights = RoutingWeights(logits.data() + row * moe.num_experts, correction, moe);
      ASSERT_EQ(std::ranges::count_if(weights, [](double w) { return w != 0; }), moe.num_experts_per_tok);
      for (size_t i = 0; i < experts.size(); ++i) {
        if (weights[i] == 0) continue;
        const bool on_input = moe.apply_router_weight_on_input;
        std::vector<float> in(x.begin() + row * kExpertHidden, x.begin() + (row + 1) * kExpertHidden);
        for (float& value : in) value *= on_input ? static_cast<float>(weights[i]) : 1.0F;
        const ExpertWeights expert = Pack(*ops, experts[i], test.store);
        std::vector<float> gate_up(2 * kExpertWidth), gated(kExpertWidth), out(kExpertHidden);
        expert.gate_up->Forward(in.data(), 1, gate_up.data(), 2 * kExpertWidth);
        ops->ActivateMul(moe.activation, moe.activation_limit, gate_up.data(), 1, kExpertWidth, gated.data(), nullptr);
        expert.down->Forward(gated.data(), 1, out.data(), kExpertHidden);
        for (size_t c = 0; c < kExpertHidden; ++c) {
          const double part = double{out[c]} * (on_input ? 1 : weights[i]);
          expected[static_cast<size_t>(row) * kExpertHidden + c] += part;
          magnitudes[static_cast<size_t>(row) * kExpertHidden + c] += std::abs(part);
        }
      }
      if (row == 20) break;  // reference rows; the others are compared with each other
    }
    const auto layer = MakeLayer(*ops, experts, test, correction);
    const std::vector<float> found = Forward(*layer, x, logits, moe.num_experts, 0, test.rows);
    for (size_t i = 0; i < static_cast<size_t>(std::min<int64_t>(test.rows, 21) * kExpertHidden); ++i) {
      // Weights have errors of a few units; on the input they pass two products.
      const double share = (moe.apply_router_weight_on_input ? 4000 : 40) * kvanta::testing::kUnitF32;
      ASSERT_NEAR(found[i], expected[i], share * (magnitudes[i] + 1)) << "row " << i / kExpertHidden;
    }
    const auto other = MakeLayer(*parallel, experts, test, correction);
    for (int64_t first = 0; first < test.rows;) {  // batches of growing size
      const int64_t count = std::min(1 + first / 3, test.rows - first);
      const std::vector<float> some = Forward(*other, x, logits, moe.num_experts, first, count);
      for (size_t i = 0; i < some.size(); ++i) {
        ASSERT_EQ(some[i], found[static_cast<size_t>(first * kExpertHidden) + i])
            << "row " << first << " and " << i / kExpertHidden;
      }
      first += count;
    }
  }
}

// A row of NaN reaches no other.
TEST_P(CpuExpertsTest, NonFiniteRowsDoNotAffectOthers) {
  const CpuExpertCase test{
      {.num_experts = 9, .num_experts_per_tok = 2, .n_group = 3, .topk_group = 2}, WeightType::kF32, 4};
  const auto ops = MakeOps(2);
  const auto layer = MakeLayer(*ops, MakeExperts(test.moe), test, {});
  const auto x = RandomValues(test.rows * kExpertHidden, 90);
  auto logits = RandomValues(test.rows * 9, 91);
  const std::vector<float> clean = Forward(*layer, x, logits, 9, 0, test.rows);
  logits[9 + 3] = NAN;
  std::fill_n(logits.begin() + 2 * 9, 9, NAN);
  const std::vector<float> dirty = Forward(*layer, x, logits, 9, 0, test.rows);
  for (size_t i = 0; i < clean.size(); ++i) {
    if (i / kExpertHidden == 1 || i / kExpertHidden == 2) continue;
    EXPECT_EQ(dirty[i], clean[i]) << i;
  }
}

// Sigmoids of large logits are all 1: the larger logit is chosen all the same.
TEST_P(CpuExpertsTest, ChoosesByLogitsWithoutACorrection) {
  const CpuExpertCase test{
      {.num_experts = 4, .num_experts_per_tok = 1, .scoring_func = ScoringFunc::kSigmoid}, WeightType::kF32, 1};
  const auto ops = MakeOps(1);
  const std::vector<Expert> experts = MakeExperts(test.moe);
  const auto layer = MakeLayer(*ops, experts, test, {});
  const auto x = RandomValues(kExpertHidden, 92);
  EXPECT_EQ(Forward(*layer, x, {40, 30, 50, 45}, 4, 0, 1), Forward(*layer, x, {0, 0, 90, 0}, 4, 0, 1));
}

}  // namespace
}  // namespace kvanta::kernels
