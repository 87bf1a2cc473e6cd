// Sampling on a GPU, against the host's sampler on the same rows.
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

  template <class T>
  Buffer Upload(const std::vector<T>& values) {
    Buffer buffer = gpu_->device().Allocate(values.size() * sizeof(T));
    gpu_->device().CopyIn(buffer.data(), values.data(), values.size() * sizeof(T));
    return buffer;
  }

  std::vector<int32_t> Sample(const std::vector<float>& logits, const std::vector<SampleParams>& params) {
    const size_t vocab = logits.size() / params.size();
    std::vector<RowArgmax> argmaxes;
    for (size_t row = 0; row < params.size(); ++row) {
      const float* begin = logits.data() + row * vocab;
      const float* largest = std::max_element(begin, begin + vocab);
      const bool finite = std::all_of(begin, begin + vocab, [](float x) { return std::isfinite(x); });
      argmaxes.push_back({*largest, static_cast<int32_t>(largest - begin), finite});
    }
    const Buffer rows = Upload(logits), device_argmaxes = Upload(argmaxes), device_params = Upload(params);
    const Buffer tokens = Upload(std::vector<int32_t>(params.size(), -3));
    ops_->Draw(rows.as<float>(), std::ssize(params), static_cast<int64_t>(vocab), device_argmaxes.as<RowArgmax>(),
               device_params.as<SampleParams>(), tokens.as<int32_t>());
    std::vector<int32_t> sampled(params.size());
    gpu_->device().CopyOut(sampled.data(), tokens.data(), tokens.bytes());
    return sampled;
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

// Several distributions, each with every combination of top_k, top_p and min_p.
TEST_P(GpuSamplingTest, TokensMatchTheHosts) {
  const SamplingParams all_params[] = {
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
    std::vector<SampleParams> sample_params;
    std::vector<int32_t> expected;
    for (int kind = 0; kind < 4; ++kind) {
      for (const SamplingParams& params : all_params) {
        std::vector<float> row(static_cast<size_t>(vocab));
        for (float& x : row) {
          x = 2.5F * normal(random);
          if (kind == 1) x = std::round(x) * 0.5F;   // many equal logits, zeros of both signs
          if (kind == 2) x = 40 * x - 300;           // a few far above the rest
          if (kind == 3) x = x > 7 ? x : 1e-3F * x;  // a few, then many close together
        }
        const SamplerState state(params, random(), {}, {});
        sample_params.push_back(state.NextSample(vocab).value());
        logits.insert(logits.end(), row.begin(), row.end());
        expected.push_back(Sampler().Sample(row, state));
      }
    }
    const std::vector<int32_t> sampled = Sample(logits, sample_params);
    int unsampled = 0;
    for (size_t i = 0; i < sampled.size(); ++i) {
      unsampled += sampled[i] == -1 ? 1 : 0;
      if (sampled[i] == -1) continue;
      EXPECT_EQ(sampled[i], expected[i]) << "row " << i << " of " << vocab;
    }
    EXPECT_LE(unsampled, vocab > kernels::kMaxCandidates ? 12 : 0) << vocab;  // nearly flat distributions
  }
}

TEST_P(GpuSamplingTest, FlatAndNonFiniteRowsAreLeftToTheHost) {
  constexpr size_t kVocab = 3000;
  std::vector<float> logits(4 * kVocab, 1.5F);
  logits[kVocab + 7] = NAN;
  logits[2 * kVocab + 8] = INFINITY;
  logits[3 * kVocab + 9] = 1.75F;
  SampleParams params{.uniform = 0.5, .scale = 1, .top_k = 1};
  EXPECT_EQ(Sample(logits, std::vector<SampleParams>(4, params)), (std::vector<int32_t>{-1, -1, -1, 9}));
  params.top_k = 0;
  params.top_p = 0.9F;
  EXPECT_EQ(Sample(logits, std::vector<SampleParams>(4, params)), (std::vector<int32_t>{-1, -1, -1, -1}));
}

TEST(GpuSampling, TooManyCandidatesAreLeftToTheHost) {
  const SamplerState many(Params(1, kernels::kMaxCandidates + 1, 1, 0), 1, {}, {});
  EXPECT_FALSE(many.NextSample(1 << 17).has_value());
  EXPECT_TRUE(many.NextSample(100).has_value());  // fewer logits than top_k
}

}  // namespace
}  // namespace kvanta::runner
