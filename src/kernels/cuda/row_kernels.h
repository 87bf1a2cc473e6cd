// Embedding, normalization and element-wise operations. Include the primitives first.
#pragma once

#include "kernels/cuda/gated_activation.h"
#include "kernels/linear/cuda/weight_panels.h"

namespace kvanta::kernels::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kRowWarps = kRowThreads / kWarp;

// Element-wise grid: each thread processes kValuesPerThread values, kRowThreads apart.
inline constexpr int kValuesPerThread = 4;
inline LaunchShape ValuesShape(int64_t count) {
  return {CeilDiv(count, int64_t{kRowThreads} * kValuesPerThread), kRowThreads, 0};
}
template <class F>
KVANTA_DEVICE void ForValues(int64_t count, F each) {
  const int64_t first = int64_t{BlockIndex()} * kRowThreads * kValuesPerThread + ThreadIndex();
  KVANTA_UNROLL
  for (int i = 0; i < kValuesPerThread; ++i) {
    const int64_t index = first + i * kRowThreads;
    if (index < count) each(index);
  }
}

// ---- embedding

inline LaunchShape ShapeOf(const EmbedOp& op) {
  return {op.rows, kRowThreads, 0};
}
KVANTA_DEVICE void RunBlock(const EmbedOp& op) {
  const int64_t row = BlockIndex();
  const int64_t id = op.ids == nullptr ? op.id : op.ids[row] - op.id;
  if (id < 0 || id >= op.table.out) return;
  for (int64_t k = ThreadIndex(); k < op.table.in; k += kRowThreads) {
    op.out[row * op.table.in + k] = WeightValue(op.table, id, k);
  }
}

// ---- parts of ranks

inline LaunchShape ShapeOf(const PickPartsOp& op) {
  return ValuesShape(op.rows * op.width);
}
KVANTA_DEVICE void RunBlock(const PickPartsOp& op) {
  ForValues(op.rows * op.width, [&](int64_t index) {
    const int64_t row = index / op.width;
    op.out[index] = op.x[(row * op.parts.ranks + op.parts.RankOf(op.ids[row])) * op.width + index % op.width];
  });
}

inline LaunchShape ShapeOf(const JoinColumnsOp& op) {
  return ValuesShape(op.rows * op.columns.count);
}
KVANTA_DEVICE void RunBlock(const JoinColumnsOp& op) {
  ForValues(op.rows * op.columns.count, [&](int64_t index) {
    const int64_t row = index / op.columns.count, column = index % op.columns.count;
    const int rank = op.columns.RankOf(column);
    op.out[index] = op.x[rank * op.rank_stride + row * op.columns.Size(rank) + column - op.columns.Begin(rank)];
  });
}

// ---- norm

// Rows up to this width take a warp, wider ones a block.
inline constexpr int kWarpRow = 256;
static_assert(kMaxTransformedHead <= kWarpRow);  // head_rows.h has the same order

inline LaunchShape ShapeOf(const NormOp& op) {
  const bool narrow = op.width <= kWarpRow;
  return {narrow ? CeilDiv(op.rows, kRowWarps) : op.rows, kRowThreads, 4 * kRowWarps};
}
// Sum over a row's threads: a warp, or the block.
KVANTA_DEVICE float SumOfRow(float sum, bool narrow) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += ShuffleXor(sum, mask);
  if (narrow) return sum;
  if (ThreadIndex() % kWarp == 0) StoreShared(4 * (ThreadIndex() / kWarp), sum);
  SyncBlock();
  sum = 0;
  for (int other = 0; other < kRowWarps; ++other) sum += LoadShared<float>(4 * other);
  return sum;
}
KVANTA_DEVICE void RunBlock(const NormOp& op) {
  const bool narrow = op.width <= kWarpRow;
  const int warp = ThreadIndex() / kWarp;
  const int64_t row = narrow ? int64_t{BlockIndex()} * kRowWarps + warp : BlockIndex();
  if (row >= op.rows) return;  // the whole warp; narrow rows have no block barrier
  const int first = narrow ? ThreadIndex() % kWarp : ThreadIndex();
  const int step = narrow ? kWarp : kRowThreads;
  const float* x = op.x + row * op.x_stride;
  const auto width = static_cast<float>(op.width);
  float mean = 0;
  if (op.subtracts_mean) {
    for (int64_t i = first; i < op.width; i += step) mean += x[i];
    mean = SumOfRow(mean, narrow) / width;
    if (!narrow) SyncBlock();  // before the sums in shared memory are replaced
  }
  float squares = 0;
  for (int64_t i = first; i < op.width; i += step) squares = MultiplyAdd(x[i] - mean, x[i] - mean, squares);
  const float factor = 1.0F / SquareRoot(SumOfRow(squares, narrow) / width + op.eps);
  float* out = op.out + row * op.out_stride;
  for (int64_t i = first; i < op.width; i += step) {
    const float value = (x[i] - mean) * factor * op.weight[i];
    out[i] = op.bias == nullptr ? value : value + op.bias[i];
  }
}

// ---- element-wise

inline LaunchShape ShapeOf(const CopyOp& op) {
  return ValuesShape(op.rows * op.width);
}
KVANTA_DEVICE void RunBlock(const CopyOp& op) {
  ForValues(op.rows * op.width, [&](int64_t index) {
    const int64_t row = index / op.width;
    const int64_t column = index % op.width;
    const int64_t from = op.ids == nullptr ? row : op.ids[row];
    op.out[row * op.out_stride + column] = op.x[from * op.x_stride + column];
  });
}

inline LaunchShape ShapeOf(const AddOp& op) {
  return ValuesShape(op.count);
}
KVANTA_DEVICE void RunBlock(const AddOp& op) {
  ForValues(op.count, [&](int64_t index) {
    const float gate = op.gate == nullptr ? 1.0F : 1.0F / (1.0F + Exp2(-op.gate[index / op.width] * kLog2E));
    op.x[index] += op.y[index] * gate;
  });
}

inline LaunchShape ShapeOf(const RopeOp& op) {
  return ValuesShape(op.rows * op.heads * (op.rotary_dim / 2));
}
KVANTA_DEVICE void RunBlock(const RopeOp& op) {
  const int half = op.rotary_dim / 2;
  ForValues(op.rows * op.heads * half, [&](int64_t index) {
    const int64_t row = index / (int64_t{op.heads} * half);
    const auto rest = static_cast<int>(index % (int64_t{op.heads} * half));
    const int channel = rest % half;
    const int64_t position = op.positions[row] / op.kind.row_tokens * op.kind.row_tokens;
    const float* cos_sin = op.cos_sin + position * op.rotary_dim + channel;
    float* low = op.x + row * op.stride + rest / half * op.head_dim + (op.kind.interleaved ? 2 * channel : channel);
    float* high = low + (op.kind.interleaved ? 1 : half);
    const float cos = cos_sin[0], sin = op.kind.inverse ? -cos_sin[half] : cos_sin[half];
    const float a = *low, b = *high;
    *low = a * cos - b * sin;
    *high = b * cos + a * sin;
  });
}

inline LaunchShape ShapeOf(const ActivateMulOp& op) {
  return ValuesShape(op.rows * op.width);
}
KVANTA_DEVICE float GatedValue(const ActivateMulOp& op, int64_t row, int64_t column) {
  const float* gate = op.gate_up + row * 2 * op.width + column;
  return GatedValue(op.activation, op.limit, gate[0], gate[op.width]);
}
KVANTA_DEVICE void RunBlock(const ActivateMulOp& op) {
  ForValues(op.rows * op.width,
            [&](int64_t index) { op.out[index] = GatedValue(op, index / op.width, index % op.width); });
}

inline LaunchShape ShapeOf(const ActivateOp& op) {
  return ValuesShape(op.count);
}
// As ActivatePoint() of the CPU.
KVANTA_DEVICE float Activated(const ActivateOp& op, float x) {
  switch (op.activation) {
    case Pointwise::kGelu:
      return 0.5F * x * erfcf(-x * 0.70710678F);
    case Pointwise::kGeluTanh:
      return x / (1.0F + Exp2(x * (x * x * kGeluCubic + kGeluLinear) * kLog2E));
    case Pointwise::kRelu:
      return x < 0 ? 0.0F : x;
    case Pointwise::kSquaredRelu:
      return x < 0 ? 0.0F : x * x;
    case Pointwise::kXielu:
      break;
  }
  return (x > 0 ? op.xielu.alpha_p * x * x : op.xielu.alpha_n * (expm1f(x) - x)) + op.xielu.beta * x;
}
KVANTA_DEVICE void RunBlock(const ActivateOp& op) {
  ForValues(op.count, [&](int64_t index) { op.x[index] = Activated(op, op.x[index]); });
}

inline LaunchShape ShapeOf(const MulOp& op) {
  return ValuesShape(op.rows * op.width);
}
KVANTA_DEVICE void RunBlock(const MulOp& op) {
  ForValues(op.rows * op.width, [&](int64_t index) {
    const int64_t row = index / op.width, column = index % op.width;
    float& x = op.x[row * op.x_stride + column];
    const float by = op.by[row * op.by_stride + column / op.channels];
    if (!op.by_gate || op.function == GateFunction::kIdentity) {
      x *= by;
    } else if (op.function == GateFunction::kSigmoid) {
      x /= 1.0F + Exp2(-by * kLog2E);
    } else {
      x *= (by > 0 ? by : 0.0F) + log1pf(expf(by > 0 ? -by : by));
    }
  });
}

inline LaunchShape ShapeOf(const ScaleOp& op) {
  return ValuesShape(op.count);
}
KVANTA_DEVICE void RunBlock(const ScaleOp& op) {
  ForValues(op.count, [&](int64_t index) {
    if (op.width == 0) {
      op.x[index] *= op.factor;
      return;
    }
    const int64_t row = index / op.width;
    float factor = op.factor;
    if (op.factors != nullptr) factor = op.factors[op.positions == nullptr ? row : op.positions[row]];
    op.x[row * op.stride + index % op.width] *= factor;
  });
}

inline LaunchShape ShapeOf(const CutOffOp& op) {
  return ValuesShape(op.rows * op.width);
}
KVANTA_DEVICE void RunBlock(const CutOffOp& op) {
  ForValues(op.rows * op.width, [&](int64_t index) {
    float& x = op.x[index / op.width * op.stride + index % op.width];
    x = x > op.limit ? op.limit : x;
  });
}

inline LaunchShape ShapeOf(const SoftcapOp& op) {
  return ValuesShape(op.count);
}
KVANTA_DEVICE void RunBlock(const SoftcapOp& op) {
  ForValues(op.count, [&](int64_t index) { op.x[index] = op.softcap * Tanh(op.x[index] / op.softcap); });
}

}  // namespace kvanta::kernels::cuda
