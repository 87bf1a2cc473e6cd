// Hyper-connections (arXiv:2409.19606) whose mixtures are doubly stochastic: hidden states are several streams. A block
// reads a weighted sum of them, and its output is added to all, after they were mixed with one another. The weights of
// a row are projections of its streams. All rows are f32, and independent of one another. transformers:
// DeepseekV4HyperConnection in models/deepseek_v4/modeling_deepseek_v4.py.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace kvanta::kernels {

struct HyperConnectionShape {
  int streams = 0;
  int64_t hidden = 0;           // channels of a stream
  int sinkhorn_iterations = 0;  // of the normalization of mixtures
  float eps = 0;

  int64_t Width() const noexcept { return streams * hidden; }
  // Weights of a row: of the block's input [streams], of its output [streams], and of the mixture [from][to].
  int64_t Weights() const noexcept { return (int64_t{2} + streams) * streams; }
};

inline constexpr int kMaxStreams = 16;

// Makes the weights of rows [rows][Weights()], in place, from the projections of the streams. scale: [3], of the three
// kinds; base: [Weights()].
void MakeStreamWeights(const HyperConnectionShape& shape, const float* scale, const float* base, int64_t rows,
                       ThreadPool& threads, float* weights) noexcept;
// The same of a model's last hidden states, weights of the input alone: [rows][streams]; base: [streams].
void MakeInputWeights(const HyperConnectionShape& shape, float scale, const float* base, int64_t rows,
                      float* weights) noexcept;

// out[row] = sum of weight * stream: streams [rows][streams][hidden], weights [rows][stride], out [rows][hidden].
void CollapseStreams(const HyperConnectionShape& shape, const float* streams, const float* weights, int64_t stride,
                     int64_t rows, ThreadPool& threads, float* out) noexcept;
// Mixes the streams in place and adds a block's output to each: weights [rows][Weights()], x [rows][hidden].
void ExpandStreams(const HyperConnectionShape& shape, const float* weights, const float* x, int64_t rows,
                   ThreadPool& threads, float* streams) noexcept;

}  // namespace kvanta::kernels
