// Operations on rows of activations, and the embedding. A unit that includes this has included the primitives.
#pragma once

#include "kernels/linear/cuda/weight_panels.h"

namespace kvanta::kernels::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kRowWarps = kRowThreads / kWarp;

// Every thread takes every kRowThreads-th value of its block's share of `count`.
inline constexpr int kValuesOfThread = 4;
inline LaunchShape ValuesShape(int64_t count) {
  constexpr int64_t kShare = int64_t{kRowThreads} * kValuesOfThread;
  return {(count + kShare - 1) / kShare, kRowThreads, 0};
}
template <class F>
KVANTA_DEVICE void ForValues(int64_t count, F each) {
  const int64_t first = int64_t{BlockIndex()} * kRowThreads * kValuesOfThread + ThreadIndex();
  KVANTA_UNROLL
  for (int i = 0; i < kValuesOfThread; ++i) {
    const int64_t index = first + i * kRowThreads;
    if (index < count) each(index);
  }
}

// ---- embedding

inline LaunchShape ShapeOf(const EmbedWork& work) {
  return {work.rows, kRowThreads, 0};
}
KVANTA_DEVICE void RunBlock(const EmbedWork& work) {
  const int64_t row = BlockIndex();
  const int64_t id = work.ids == nullptr ? work.id : work.ids[row];
  for (int64_t k = ThreadIndex(); k < work.table.in; k += kRowThreads) {
    work.out[row * work.table.in + k] = WeightValue(work.table, id, k);
  }
}

// ---- norm

// Rows up to this width are a warp's, others a block's.
inline constexpr int kWarpRow = 256;

inline LaunchShape ShapeOf(const NormWork& work) {
  const bool narrow = work.width <= kWarpRow;
  return {narrow ? (work.rows + kRowWarps - 1) / kRowWarps : work.rows, kRowThreads, 4 * kRowWarps};
}
KVANTA_DEVICE void RunBlock(const NormWork& work) {
  const bool narrow = work.width <= kWarpRow;
  const int warp = ThreadIndex() / kWarp;
  const int64_t row = narrow ? int64_t{BlockIndex()} * kRowWarps + warp : BlockIndex();
  if (row >= work.rows) return;  // a whole warp, and then no barrier of the block follows
  const int first = narrow ? ThreadIndex() % kWarp : ThreadIndex();
  const int step = narrow ? kWarp : kRowThreads;
  const float* x = work.x + row * work.x_stride;
  float sum = 0;
  for (int64_t i = first; i < work.width; i += step) sum = MultiplyAdd(x[i], x[i], sum);
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += ShuffleXor(sum, mask);
  if (!narrow) {
    if (ThreadIndex() % kWarp == 0) StoreShared(4 * warp, sum);
    SyncBlock();
    sum = 0;
    for (int other = 0; other < kRowWarps; ++other) sum += LoadShared<float>(4 * other);
  }
  const float factor = 1.0F / SquareRoot(sum / static_cast<float>(work.width) + work.eps);
  float* out = work.out + row * work.out_stride;
  for (int64_t i = first; i < work.width; i += step) out[i] = x[i] * factor * work.weight[i];
}

// ---- copies, sums, rotations, gates

inline LaunchShape ShapeOf(const CopyWork& work) {
  return ValuesShape(work.rows * work.width);
}
KVANTA_DEVICE void RunBlock(const CopyWork& work) {
  ForValues(work.rows * work.width, [&](int64_t index) {
    const int64_t row = index / work.width;
    const int64_t column = index % work.width;
    const int64_t from = work.ids == nullptr ? row : work.ids[row];
    work.out[row * work.out_stride + column] = work.x[from * work.x_stride + column];
  });
}

inline LaunchShape ShapeOf(const AddWork& work) {
  return ValuesShape(work.count);
}
KVANTA_DEVICE void RunBlock(const AddWork& work) {
  ForValues(work.count, [&](int64_t index) { work.x[index] += work.y[index]; });
}

inline LaunchShape ShapeOf(const RopeWork& work) {
  return ValuesShape(work.rows * work.heads * (work.rotary_dim / 2));
}
KVANTA_DEVICE void RunBlock(const RopeWork& work) {
  const int half = work.rotary_dim / 2;
  ForValues(work.rows * work.heads * half, [&](int64_t index) {
    const int64_t row = index / (int64_t{work.heads} * half);
    const auto rest = static_cast<int>(index % (int64_t{work.heads} * half));
    const int channel = rest % half;
    const float* turn = work.cos_sin + work.positions[row] * work.rotary_dim + channel;
    float* low = work.x + row * work.stride + rest / half * work.head_dim + channel;
    float* high = low + half;
    const float cos = turn[0], sin = turn[half];
    const float a = *low, b = *high;
    *low = a * cos - b * sin;
    *high = b * cos + a * sin;
  });
}

inline LaunchShape ShapeOf(const GateWork& work) {
  return ValuesShape(work.rows * work.width);
}
KVANTA_DEVICE void RunBlock(const GateWork& work) {
  constexpr float kLog2E = 1.44269504F;
  ForValues(work.rows * work.width, [&](int64_t index) {
    const float* gate = work.gate_up + index / work.width * 2 * work.width + index % work.width;
    const float x = *gate;
    const float exponent = work.activation == Activation::kSilu ? -x : x * (x * x * kGeluCubic + kGeluLinear);
    work.out[index] = x / (1.0F + Exp2(exponent * kLog2E)) * gate[work.width];
  });
}

inline LaunchShape ShapeOf(const ScaleWork& work) {
  return ValuesShape(work.count);
}
KVANTA_DEVICE void RunBlock(const ScaleWork& work) {
  ForValues(work.count, [&](int64_t index) { work.x[index] *= work.factor; });
}

inline LaunchShape ShapeOf(const SoftcapWork& work) {
  return ValuesShape(work.count);
}
KVANTA_DEVICE void RunBlock(const SoftcapWork& work) {
  ForValues(work.count, [&](int64_t index) { work.x[index] = work.softcap * Tanh(work.x[index] / work.softcap); });
}

}  // namespace kvanta::kernels::cuda
