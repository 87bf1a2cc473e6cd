// Hyper-connections: weights of a row by a warp, streams by a thread per channel. Include the primitives first.
#pragma once

#include "kernels/cuda/row_kernels.h"
#include "kernels/hyper_connections/cuda/stream_ops.h"

namespace kvanta::kernels::cuda {

inline LaunchShape ShapeOf(const StreamWeightsOp& op) {
  const int mixture = op.shape.streams * op.shape.streams;
  return {CeilDiv(op.rows, int64_t{kRowWarps}), kRowThreads, 4 * kRowWarps * mixture};
}

// A row's mixture, f32 [from][to] in shared memory.
struct Mixture {
  int at;
  int n;
  float eps;

  KVANTA_DEVICE int Element(int from, int to) const { return at + 4 * (from * n + to); }

  // The softmax of a row, of a lane.
  KVANTA_DEVICE void Softmax(int row, const float* x, float scale, const float* base) const {
    float largest = -std::bit_cast<float>(0x7F800000U);
    for (int i = 0; i < n; ++i) largest = fmaxf(largest, MultiplyAdd(x[i], scale, base[i]));
    float sum = 0;
    for (int i = 0; i < n; ++i) {
      const float value = Exp2((MultiplyAdd(x[i], scale, base[i]) - largest) * kLog2E);
      sum += value;
      StoreShared(Element(row, i), value);
    }
    for (int i = 0; i < n; ++i) StoreShared(Element(row, i), LoadShared<float>(Element(row, i)) / sum + eps);
  }
  // Divides the rows, or columns, by their sums: lane i has the i'th.
  KVANTA_DEVICE void Normalize(bool columns, int lane) const {
    if (lane < n) {
      const auto element = [&](int i) { return columns ? Element(i, lane) : Element(lane, i); };
      float sum = 0;
      for (int i = 0; i < n; ++i) sum += LoadShared<float>(element(i));
      for (int i = 0; i < n; ++i) StoreShared(element(i), LoadShared<float>(element(i)) / (sum + eps));
    }
    SyncWarp();
  }
};

KVANTA_DEVICE void RunBlock(const StreamWeightsOp& op) {
  const HyperConnectionShape& shape = op.shape;
  const int lane = ThreadIndex() % kWarp, warp = ThreadIndex() / kWarp, n = shape.streams;
  const int64_t row = int64_t{BlockIndex()} * kRowWarps + warp;
  if (row >= op.rows) return;  // the whole warp
  float* weights = op.weights + row * shape.Weights();
  const float *scale = op.parameters.scale, *base = op.parameters.base;
  const auto sigmoid = [](float x) { return 1.0F / (1.0F + Exp2(-x * kLog2E)); };
  if (lane < n) {
    weights[lane] = sigmoid(MultiplyAdd(weights[lane], scale[0], base[lane])) + shape.eps;
    if (!shape.head) weights[n + lane] = 2 * sigmoid(MultiplyAdd(weights[n + lane], scale[1], base[n + lane]));
  }
  if (shape.head) return;
  const Mixture mixture{.at = 4 * warp * n * n, .n = n, .eps = shape.eps};
  if (lane < n) mixture.Softmax(lane, weights + (2 + lane) * n, scale[2], base + (2 + lane) * n);
  SyncWarp();
  mixture.Normalize(true, lane);
  for (int i = 1; i < shape.sinkhorn_iterations; ++i) {
    mixture.Normalize(false, lane);
    mixture.Normalize(true, lane);
  }
  for (int i = lane; i < n * n; i += kWarp) weights[2 * n + i] = LoadShared<float>(mixture.at + 4 * i);
}

inline LaunchShape ShapeOf(const CollapseStreamsOp& op) {
  return ValuesShape(op.rows * op.shape.hidden);
}
KVANTA_DEVICE void RunBlock(const CollapseStreamsOp& op) {
  const int64_t hidden = op.shape.hidden;
  ForValues(op.rows * hidden, [&](int64_t index) {
    const int64_t row = index / hidden;
    const float *streams = op.streams + row * op.shape.Width() + index % hidden,
                *weights = op.weights + row * op.shape.Weights();
    float sum = weights[0] * streams[0];
    for (int stream = 1; stream < op.shape.streams; ++stream) {
      sum = MultiplyAdd(weights[stream], streams[stream * hidden], sum);
    }
    op.out[index] = sum;
  });
}

inline LaunchShape ShapeOf(const ExpandStreamsOp& op) {
  return ValuesShape(op.rows * op.shape.hidden);
}
KVANTA_DEVICE void RunBlock(const ExpandStreamsOp& op) {
  const int64_t hidden = op.shape.hidden;
  const int n = op.shape.streams;
  ForValues(op.rows * hidden, [&](int64_t index) {
    const int64_t row = index / hidden;
    float* streams = op.streams + row * op.shape.Width() + index % hidden;
    const float* output = op.weights + row * op.shape.Weights() + n;
    const float* mixture = output + n;
    float before[kMaxStreams];
    KVANTA_UNROLL
    for (int from = 0; from < kMaxStreams; ++from) before[from] = from < n ? streams[from * hidden] : 0.0F;
    for (int to = 0; to < n; ++to) {
      float mixed = output[to] * op.x[index];
      KVANTA_UNROLL
      for (int from = 0; from < kMaxStreams; ++from) {
        if (from < n) mixed = MultiplyAdd(mixture[from * n + to], before[from], mixed);
      }
      streams[to * hidden] = mixed;
    }
  });
}

}  // namespace kvanta::kernels::cuda
