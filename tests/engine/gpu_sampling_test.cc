// Sampling on the GPU, compared with the host's sampler on the same rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "emulated/gpus.h"
#include "kernels/cuda/cuda_context.h"
#include "runner/sampler.h"

namespace kvanta::runner {
namespace {

using kernels::RowArgmax;
using kernels::SampleParams;

class GpuSamplingTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    Start(GetParam());
    if (gpu_ != nullptr) ops_ = kernels::MakeGpuOps(gpu_, std::make_shared<ThreadPool>(1));
  }

  std::vector<int32_t> Sample(const std::vector<float>& logits, const std::vector<SampleParams>& draws) {
    const size_t vocab = logits.size() / draws.size();
    std::vector<RowArgmax> argmaxes;
    for (size_t row = 0; row < draws.size(); ++row) {
      const float* begin = logits.data() + row * vocab;
      const float* largest = std::max_element(begin, begin + vocab);
      const bool finite = std::all_of(begin, begin + vocab, [](float x) { return std::isfinite(x); });
      argmaxes.push_back({*largest, static_cast<int32_t>(largest - begin), finite});
    }
    const Buffer rows = Upload(logits), tops = Upload(argmaxes), given = Upload(draws);
    const Buffer tokens = Upload(std::vector<int32_t>(draws.size(), -3));
    ops_->Sample(rows.as<float>(), std::ssize(draws), static_cast<int64_t>(vocab), tops.as<RowArgmax>(),
                 given.as<SampleParams>(), tokens.as<int32_t>());
    std::vector<int32_t> drawn(draws.size());
    gpu_->device().CopyOut(drawn.data(), tokens.data(), tokens.bytes());
    return drawn;
  }

  std::unique_ptr<kernels::Ops> ops_;
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuSamplingTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

SamplingParams Params(float temperature, int top_k, float top_p, float min_p) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  return params;
}

// Rows of several kinds, each with every cut.
TEST_P(GpuSamplingTest, SamplesTheHostsTokens) {
  const SamplingParams cuts[] = {
      Params(1, 0, 0.9F, 0),        Params(0.7F, 50, 1, 0),    Params(1.3F, 20, 0.8F, 0), Params(1, 0, 0.95F, 0.02F),
      Params(0.6F, 1, 1, 0),        Params(1, 2048, 0.99F, 0), Params(1, 40, 1, 0.1F),    Params(0.02F, 5, 0.5F, 0),
      Params(1, 0, 0, 0),           Params(3, 7, 1, 0),        Params(1, 0, 1, 0.05F),    Params(1, 0, 1, 0),
      Params(100, 1000, 0.999F, 0), Params(1e-4F, 0, 0.5F, 0),
  };
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
#ifdef KVANTA_SANITIZED
  const int vocabularies[] = {1000, 49152};
#else
  const int vocabularies[] = {1, 37, 1000, 49152, 151936};
#endif
  for (const int vocab : vocabularies) {
    std::vector<float> logits;
    std::vector<SampleParams> draws;
    std::vector<int32_t> expected;
    for (int kind = 0; kind < 4; ++kind) {
      for (const SamplingParams& params : cuts) {
        std::vector<float> row(static_cast<size_t>(vocab));
        for (float& x : row) {
          x = 2.5F * normal(random);
          if (kind == 1) x = std::round(x) * 0.5F;   // many that are equal, zeros of both signs
          if (kind == 2) x = 40 * x - 300;           // a few far above the others
          if (kind == 3) x = x > 7 ? x : 1e-3F * x;  // a few, then many side by side
        }
        const SamplerState state(params, random(), {}, {});
        draws.push_back(state.NextSample(vocab).value());
        logits.insert(logits.end(), row.begin(), row.end());
        expected.push_back(Sampler().Sample(row, state));
      }
    }
    const std::vector<int32_t> drawn = Sample(logits, draws);
    int left = 0;
    for (size_t i = 0; i < drawn.size(); ++i) {
      left += drawn[i] == -1 ? 1 : 0;
      if (drawn[i] == -1) continue;
      EXPECT_EQ(drawn[i], expected[i]) << "row " << i << " of " << vocab;
    }
    EXPECT_LE(left, vocab > kernels::kMaxCandidates ? 12 : 0) << vocab;  // nearly flat rows
  }
}

TEST_P(GpuSamplingTest, FlatAndNonFiniteRowsAreLeftToTheHost) {
  constexpr size_t kVocab = 3000;
  std::vector<float> logits(4 * kVocab, 1.5F);
  logits[kVocab + 7] = NAN;
  logits[2 * kVocab + 8] = INFINITY;
  logits[3 * kVocab + 9] = 1.75F;
  SampleParams draw{.uniform = 0.5, .scale = 1, .top_k = 1};
  EXPECT_EQ(Sample(logits, std::vector<SampleParams>(4, draw)), (std::vector<int32_t>{-1, -1, -1, 9}));
  draw.top_k = 0;
  draw.top_p = 0.9F;
  EXPECT_EQ(Sample(logits, std::vector<SampleParams>(4, draw)), (std::vector<int32_t>{-1, -1, -1, -1}));
}

TEST(GpuSampling, TooManyCandidatesAreLeftToTheHost) {
  const SamplerState many(Params(1, kernels::kMaxCandidates + 1, 1, 0), 1, {}, {});
  EXPECT_FALSE(many.NextSample(1 << 17).has_value());
  EXPECT_TRUE(many.NextSample(100).has_value());  // all of these
}

}  // namespace
}  // namespace kvanta::runner
