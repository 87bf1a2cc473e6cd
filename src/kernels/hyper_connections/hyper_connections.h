// Hyper-connections (arXiv:2409.19606) whose mixtures are doubly stochastic: hidden states are several streams. A block
// reads a weighted sum of them, and its output is added to all, after they were mixed with one another. The weights of
// a row are projections of its streams. All rows are f32, and independent of one another. transformers:
// DeepseekV4HyperConnection in models/deepseek_v4/modeling_deepseek_v4.py.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvanta::kernels {

struct HyperConnectionShape {
  int streams = 0;
  int64_t hidden = 0;           // channels of a stream
  int sinkhorn_iterations = 0;  // of the normalization of mixtures
  float eps = 0;
  bool head = false;  // of a model's last hidden states, which have weights of the input alone

  KVANTA_HD constexpr int64_t Width() const noexcept { return streams * hidden; }
  // Weights of a row: of the block's input [streams], of its output [streams], and of the mixture [from][to].
  KVANTA_HD constexpr int64_t Weights() const noexcept { return (head ? 1 : int64_t{2} + streams) * streams; }
};

inline constexpr int kMaxStreams = 16;

// Parameters of a row's weights: factors of the projections by their kind (input, output, mixture), and what is added.
struct StreamParameters {
  const float* scale = nullptr;  // [3], of a head [1]
  const float* base = nullptr;   // [Weights()]
};

}  // namespace kvanta::kernels
