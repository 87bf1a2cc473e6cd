#include "kernels/hyper_connections/cpu/hyper_connections.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/math.h"

namespace kvanta::kernels {
namespace {

constexpr int64_t kStreamChannels = 64;  // mixed at once: all streams of them are in L1

float StreamSigmoid(float x) noexcept {
  return 1.0F / (1.0F + std::exp(-x));
}

// x = softmax(x * scale + base) + eps, [n].
void MixtureRow(int n, float scale, const float* base, float eps, float* x) noexcept {
  for (int i = 0; i < n; ++i) x[i] = x[i] * scale + base[i];
  const float largest = *std::max_element(x, x + n);
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - largest);
  for (int i = 0; i < n; ++i) x[i] = x[i] / sum + eps;
}

// Divides each of `n` runs of n elements, `step` apart, by its sum plus eps; runs are `run` apart.
void NormalizeRuns(int n, int run, int step, float eps, float* matrix) noexcept {
  for (int i = 0; i < n; ++i) {
    float* first = matrix + int64_t{i} * run;
    float sum = 0;
    for (int j = 0; j < n; ++j) sum += first[int64_t{j} * step];
    for (int j = 0; j < n; ++j) first[int64_t{j} * step] /= sum + eps;
  }
}

// Doubly stochastic after some iterations (Sinkhorn and Knopp).
void MakeMixture(const HyperConnectionShape& shape, float scale, const float* base, float* matrix) noexcept {
  const int n = shape.streams;
  for (int row = 0; row < n; ++row) {
    MixtureRow(n, scale, base + int64_t{row} * n, shape.eps, matrix + int64_t{row} * n);
  }
  NormalizeRuns(n, 1, n, shape.eps, matrix);  // columns
  for (int i = 1; i < shape.sinkhorn_iterations; ++i) {
    NormalizeRuns(n, n, 1, shape.eps, matrix);
    NormalizeRuns(n, 1, n, shape.eps, matrix);
  }
}

}  // namespace

void MakeStreamWeights(const HyperConnectionShape& shape, const StreamParameters& parameters, int64_t rows,
                       ThreadPool& threads, float* weights) noexcept {
  const int n = shape.streams;
  const float *scale = parameters.scale, *base = parameters.base;
  auto make = [&](int64_t row, int) {
    float* input = weights + row * shape.Weights();
    float* output = input + n;
    for (int i = 0; i < n; ++i) {
      input[i] = StreamSigmoid(input[i] * scale[0] + base[i]) + shape.eps;
      if (!shape.head) output[i] = 2 * StreamSigmoid(output[i] * scale[1] + base[n + i]);
    }
    if (!shape.head) MakeMixture(shape, scale[2], base + int64_t{2} * n, output + n);
  };
  threads.ForEach(rows, make);
}

void CollapseStreams(const HyperConnectionShape& shape, const float* streams, const float* weights, int64_t rows,
                     ThreadPool& threads, float* out) noexcept {
  auto collapse = [&](int64_t row, int) {
    const float *of_row = streams + row * shape.Width(), *weight = weights + row * shape.Weights();
    float* to = out + row * shape.hidden;
    for (int64_t i = 0; i < shape.hidden; ++i) to[i] = weight[0] * of_row[i];
    for (int stream = 1; stream < shape.streams; ++stream) {
      const float* from = of_row + stream * shape.hidden;
      for (int64_t i = 0; i < shape.hidden; ++i) to[i] += weight[stream] * from[i];
    }
  };
  threads.ForEach(rows, collapse);
}

void ExpandStreams(const HyperConnectionShape& shape, const float* weights, const float* x, int64_t rows,
                   ThreadPool& threads, float* streams) noexcept {
  const int n = shape.streams;
  auto expand = [&](int64_t row, int) {
    const float* output = weights + row * shape.Weights() + n;
    const float* mixture = output + n;
    const float* added = x + row * shape.hidden;
    float* of_row = streams + row * shape.Width();
    std::array<float, kMaxStreams * kStreamChannels> before;
    for (int64_t first = 0; first < shape.hidden; first += kStreamChannels) {
      const int64_t count = std::min(kStreamChannels, shape.hidden - first);
      for (int from = 0; from < n; ++from) {
        std::copy_n(of_row + from * shape.hidden + first, count, before.data() + from * kStreamChannels);
      }
      for (int to = 0; to < n; ++to) {
        float* mixed = of_row + to * shape.hidden + first;
        for (int64_t i = 0; i < count; ++i) mixed[i] = output[to] * added[first + i];
        for (int from = 0; from < n; ++from) {
          const float weight = mixture[from * n + to];
          const float* values = before.data() + from * kStreamChannels;
          for (int64_t i = 0; i < count; ++i) mixed[i] += weight * values[i];
        }
      }
    }
  };
  threads.ForEach(rows, expand);
}

}  // namespace kvanta::kernels
