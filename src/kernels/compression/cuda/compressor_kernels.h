// Compressor of tokens: a thread has one channel of the entry that ends in a row. Include the primitives first.
#pragma once

#include "kernels/compression/cuda/compressor_ops.h"
#include "kernels/linear_attention/cuda/causal_conv_kernel.h"

namespace kvanta::kernels::cuda {

// A sequence's tokens: rows of the step, and before them those of the state.
struct SequenceInputs {
  const float* state = nullptr;   // before the step; null: zeros
  const float* inputs = nullptr;  // of the step's first token
  int64_t start = 0;              // its position

  template <class Op>
  KVANTA_DEVICE SequenceInputs(const Op& op, int32_t sequence) {
    const cache::StateTable& table = *op.states.table;
    const cache::StateSegment first = table.segments[table.first_segments[sequence]];
    state = StateOf(op.states, first.from);
    inputs = op.inputs + first.first_row * op.shape.InputWidth();
    start = op.positions[first.first_row];
  }
};

// The sequence of a row; -1: none, a row that pads a bucket.
KVANTA_DEVICE int32_t SequenceOfRow(const cache::StateTable& table, int64_t row) {
  int32_t low = 0, high = table.sequences;  // the last sequence whose rows begin at `row` or before
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (table.segments[table.first_segments[middle]].first_row <= row ? low : high) = middle;
  }
  if (high == 0) return -1;
  const cache::StateSegment last = table.segments[table.first_segments[low + 1] - 1];
  return row < last.first_row + last.tokens ? low : -1;
}

inline LaunchShape ShapeOf(const MakeEntriesOp& op) {
  return {op.rows * CeilDiv(op.shape.entry_dim + op.shape.key_dim, kRowThreads), kRowThreads, 0};
}

KVANTA_DEVICE void RunBlock(const MakeEntriesOp& op) {
  const CompressorShape& shape = op.shape;
  const int64_t blocks = CeilDiv(shape.entry_dim + shape.key_dim, kRowThreads);
  const int64_t row = BlockIndex() / blocks, position = op.positions[row];
  if ((position + 1) % shape.row_tokens != 0) return;
  const int32_t sequence = SequenceOfRow(*op.states.table, row);
  const auto column = static_cast<int>(BlockIndex() % blocks) * kRowThreads + ThreadIndex();
  if (sequence < 0 || column >= shape.entry_dim + shape.key_dim) return;
  const bool is_key = column >= shape.entry_dim;
  const int width = is_key ? shape.key_dim : shape.entry_dim, channel = is_key ? column - shape.entry_dim : column;
  const auto series = static_cast<int>(shape.Series());
  const int64_t gates = int64_t{series} * width;  // columns from a value to its gate
  const int64_t first = is_key ? 2 * int64_t{series} * shape.entry_dim + channel : channel;
  const float* bias = (is_key ? op.key_bias : op.entry_bias) + channel;
  const SequenceInputs tokens(op, sequence);
  // Calls visit(value, gate) for the entry's tokens, in their order.
  const auto for_tokens = [&](auto visit) {
    for (int s = 0; s < series; ++s) {
      const int64_t begin = position + 1 - int64_t{series - s} * shape.row_tokens;
      if (begin < 0) continue;  // the first entry has no tokens before
      for (int token = 0; token < shape.row_tokens; ++token) {
        const int64_t at = begin + token;
        const float* from = at < tokens.start ? tokens.state + at % shape.KeptTokens() * shape.InputWidth()
                                              : tokens.inputs + (at - tokens.start) * shape.InputWidth();
        from += first + int64_t{s} * width;
        visit(from[0], from[gates] + bias[token * gates + int64_t{s} * width]);
      }
    }
  };
  float largest = -std::bit_cast<float>(0x7F800000U);
  for_tokens([&](float /*value*/, float gate) { largest = fmaxf(largest, gate); });
  float sum = 0, out = 0;
  for_tokens([&](float value, float gate) {
    const float weight = Exp2((gate - largest) * kLog2E);
    sum += weight;
    out = MultiplyAdd(weight, value, out);
  });
  (is_key ? op.keys : op.entries)[row * width + channel] = out / sum;
}

// A block per sequence and token that the state keeps.
inline LaunchShape ShapeOf(const KeepInputsOp& op) {
  return {op.states.max_sequences * op.shape.KeptTokens(), kRowThreads, 0};
}

KVANTA_DEVICE void RunBlock(const KeepInputsOp& op) {
  const cache::StateTable& table = *op.states.table;
  const int64_t kept = op.shape.KeptTokens(), width = op.shape.InputWidth(), place = BlockIndex() % kept;
  const auto sequence = static_cast<int32_t>(BlockIndex() / kept);
  if (sequence >= table.sequences) return;
  const SequenceInputs tokens(op, sequence);
  const int32_t begin = table.first_segments[sequence], end = table.first_segments[sequence + 1];
  const int64_t first_row = table.segments[begin].first_row;
  for (int32_t index = begin; index < end; ++index) {
    const cache::StateSegment segment = table.segments[index];
    float* to = StateOf(op.states, segment.to);
    if (to == nullptr) continue;  // drafts
    // The last position of this place.
    const int64_t last = tokens.start + segment.first_row + segment.tokens - first_row - 1;
    const int64_t position = last - ((last - place) % kept + kept) % kept;
    const bool is_new = position >= tokens.start;
    if (!is_new && to == tokens.state) continue;
    const float* from = is_new                    ? tokens.inputs + (position - tokens.start) * width
                        : tokens.state != nullptr ? tokens.state + place * width
                                                  : nullptr;
    for (int64_t i = ThreadIndex(); i < width; i += kRowThreads) {
      to[place * width + i] = from == nullptr ? 0.0F : from[i];
    }
  }
}

}  // namespace kvanta::kernels::cuda
