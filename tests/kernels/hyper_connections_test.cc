// Hyper-connections: mixtures are doubly stochastic, and streams equal sums in double precision.
#include "kernels/hyper_connections/cpu/hyper_connections.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/random_values.h"

namespace kvanta::kernels {
namespace {

constexpr HyperConnectionShape kStreams = {.streams = 4, .hidden = 200, .sinkhorn_iterations = 20, .eps = 1e-6F};
constexpr int64_t kStreamRows = 5;

std::vector<float> StreamWeights() {
  std::vector<float> weights = RandomValues(kStreamRows * kStreams.Weights(), 1);
  const std::vector<float> base = RandomValues(kStreams.Weights(), 2);
  const float scale[] = {0.5F, 1, 0.5F};
  ThreadPool threads(2);
  MakeStreamWeights(kStreams, {.scale = scale, .base = base.data()}, kStreamRows, threads, weights.data());
  return weights;
}

TEST(HyperConnections, MixturesAreDoublyStochastic) {
  const std::vector<float> weights = StreamWeights();
  const int n = kStreams.streams;
  for (int64_t row = 0; row < kStreamRows; ++row) {
    const float* mixture = weights.data() + row * kStreams.Weights() + 2 * n;
    for (int i = 0; i < n; ++i) {
      double of_row = 0, of_column = 0;
      for (int j = 0; j < n; ++j) {
        EXPECT_GT(mixture[i * n + j], 0);
        of_row += double{mixture[i * n + j]};
        of_column += double{mixture[j * n + i]};
      }
      EXPECT_NEAR(of_row, 1, 1e-3);
      EXPECT_NEAR(of_column, 1, 1e-5) << "normalized last";
    }
  }
}

TEST(HyperConnections, WeightsOfInputsAndOutputsAreSigmoids) {
  const std::vector<float> projected = RandomValues(kStreamRows * kStreams.Weights(), 1);
  const std::vector<float> base = RandomValues(kStreams.Weights(), 2), weights = StreamWeights();
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  for (int64_t row = 0; row < kStreamRows; ++row) {
    for (int64_t i = 0; i < kStreams.streams; ++i) {
      const auto at = static_cast<size_t>(row * kStreams.Weights() + i), output = at + kStreams.streams;
      const auto base_at = static_cast<size_t>(i);
      EXPECT_NEAR(weights[at], sigmoid(0.5 * double{projected[at]} + double{base[base_at]}) + 1e-6, 1e-6);
      EXPECT_NEAR(weights[output], 2 * sigmoid(double{projected[output]} + double{base[base_at + kStreams.streams]}),
                  1e-6);
    }
  }
}

TEST(HyperConnections, StreamsAreCollapsedAndExpanded) {
  const std::vector<float> weights = StreamWeights(), before = RandomValues(kStreamRows * kStreams.Width(), 3);
  const std::vector<float> added = RandomValues(kStreamRows * kStreams.hidden, 4);
  std::vector<float> out(static_cast<size_t>(kStreamRows * kStreams.hidden)), after = before;
  ThreadPool threads(2);
  CollapseStreams(kStreams, before.data(), weights.data(), kStreamRows, threads, out.data());
  ExpandStreams(kStreams, weights.data(), added.data(), kStreamRows, threads, after.data());
  const int64_t n = kStreams.streams;
  for (int64_t row = 0; row < kStreamRows; ++row) {
    const float* of_row = weights.data() + row * kStreams.Weights();
    const auto stream = [&](int64_t index, int64_t i) {
      return double{before[static_cast<size_t>((row * n + index) * kStreams.hidden + i)]};
    };
    for (int64_t i = 0; i < kStreams.hidden; ++i) {
      double collapsed = 0;
      for (int64_t from = 0; from < n; ++from) collapsed += double{of_row[from]} * stream(from, i);
      ASSERT_NEAR(out[static_cast<size_t>(row * kStreams.hidden + i)], collapsed, 1e-5);
      for (int64_t to = 0; to < n; ++to) {
        double mixed = double{of_row[n + to]} * double{added[static_cast<size_t>(row * kStreams.hidden + i)]};
        for (int64_t from = 0; from < n; ++from) mixed += double{of_row[2 * n + from * n + to]} * stream(from, i);
        ASSERT_NEAR(after[static_cast<size_t>((row * n + to) * kStreams.hidden + i)], mixed, 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace kvanta::kernels
