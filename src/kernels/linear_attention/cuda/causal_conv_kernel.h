// Causal depthwise convolutions: a thread has one channel of up to kConvRows rows of a sequence. Include the primitives
// first.
#pragma once

#include "kernels/cuda/row_kernels.h"

namespace kvanta::kernels::cuda {

inline constexpr int kConvRows = 64;
static_assert(kConvRows >= kMaxConvWidth, "inputs before a later chunk are rows of the step");

KVANTA_DEVICE float* StateOf(const DeviceStates& states, cache::PageId page) {
  return page == cache::kNoPage ? nullptr : reinterpret_cast<float*>(states.base + page * states.record_bytes);
}

// Rows of one sequence: chunk `index` of it.
struct ConvChunk {
  int32_t first_segment = 0, end_segment = 0;  // none: no chunk
  int64_t index = 0;
  int64_t begin = 0, end = 0;  // the sequence's rows
};

// Chunk j of sequence s has the slot (first row of s) / kConvRows + s + j: slots of different chunks differ, and there
// are at most rows / kConvRows + sequences.
inline LaunchShape ShapeOf(const CausalConvOp& op) {
  return {(op.rows / kConvRows + op.states.max_sequences) * CeilDiv(op.channels, int64_t{kRowThreads}), kRowThreads, 0};
}
KVANTA_DEVICE ConvChunk FindChunk(const cache::StateTable& table, int64_t slot) {
  const auto first_row = [&](int32_t sequence) { return table.segments[table.first_segments[sequence]].first_row; };
  int32_t low = 0, high = table.sequences;  // the last sequence whose slots begin at `slot` or before
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (first_row(middle) / kConvRows + middle <= slot ? low : high) = middle;
  }
  if (high == 0) return {};
  const int64_t begin = first_row(low), index = slot - (begin / kConvRows + low);
  const int32_t end_segment = table.first_segments[low + 1];
  const cache::StateSegment last = table.segments[end_segment - 1];
  const int64_t end = last.first_row + last.tokens;
  if (index < 0 || begin + index * kConvRows >= end) return {};
  return {.first_segment = table.first_segments[low],
          .end_segment = end_segment,
          .index = index,
          .begin = begin,
          .end = end};
}

// One channel of a chunk. Inputs are aligned to the end of arrays: the last one is the newest.
struct ConvChannel {
  static constexpr int kPast = kMaxConvWidth - 1;

  const CausalConvOp& op;
  const ConvChunk& chunk;
  int64_t channel;
  int past;
  float before[kPast] = {};  // the sequence's inputs before the step

  KVANTA_DEVICE ConvChannel(const CausalConvOp& conv, const ConvChunk& rows, int64_t index)
      : op(conv), chunk(rows), channel(index), past(conv.taps - 1) {
    const float* state = chunk.index == 0 ? StateOf(op.states, TableSegment(chunk.first_segment).from) : nullptr;
    if (state == nullptr) return;
    KVANTA_UNROLL
    for (int i = 0; i < kPast; ++i) {
      if (i >= kPast - past) before[i] = state[InState(i)];
    }
  }

  KVANTA_DEVICE cache::StateSegment TableSegment(int32_t segment) const { return op.states.table->segments[segment]; }
  KVANTA_DEVICE int64_t InState(int i) const {
    return op.state_offset + int64_t{i - (kPast - past)} * op.channels + channel;
  }
  KVANTA_DEVICE float Input(int64_t row) const { return op.input[row * op.stride + op.groups.At(channel)]; }

  KVANTA_DEVICE void ComputeRows() const {
    float weights[kMaxConvWidth] = {};
    float inputs[kMaxConvWidth] = {};
    const int64_t first = chunk.begin + chunk.index * kConvRows;
    KVANTA_UNROLL
    for (int i = 0; i < kMaxConvWidth; ++i) {
      if (i < kPast - past) continue;
      weights[i] = op.weights[int64_t{i - (kPast - past)} * op.channels + channel];
      if (i < kPast) inputs[i + 1] = chunk.index == 0 ? before[i] : Input(first - kPast + i);
    }
    const float bias = op.bias == nullptr ? 0.0F : op.bias[channel];
    const int64_t end = first + kConvRows < chunk.end ? first + kConvRows : chunk.end;
    for (int64_t row = first; row < end; ++row) {
      KVANTA_UNROLL
      for (int i = 0; i < kPast; ++i) inputs[i] = inputs[i + 1];
      inputs[kPast] = Input(row);
      float sum = bias;
      KVANTA_UNROLL
      for (int i = 0; i < kMaxConvWidth; ++i) {
        if (i >= kPast - past) sum = MultiplyAdd(inputs[i], weights[i], sum);
      }
      if (op.silu) sum = sum / (1.0F + Exp2(-sum * kLog2E));
      if (op.gate != nullptr) sum *= op.gate[row * op.stride + channel];
      op.out[row * op.channels + channel] = sum;
    }
  }

  // The first chunk stores the states: it alone reads the one before the step, which may be overwritten.
  KVANTA_DEVICE void StoreStates() const {
    for (int32_t index = chunk.first_segment; index < chunk.end_segment; ++index) {
      const cache::StateSegment segment = TableSegment(index);
      float* state = StateOf(op.states, segment.to);
      if (state == nullptr) continue;
      const int64_t oldest = segment.first_row + segment.tokens - kPast;
      KVANTA_UNROLL
      for (int i = 0; i < kPast; ++i) {
        if (i < kPast - past) continue;
        const int64_t row = oldest + i;
        float value = 0;
        KVANTA_UNROLL
        for (int j = 0; j < kPast; ++j) {
          if (row == chunk.begin - kPast + j) value = before[j];
        }
        state[InState(i)] = row < chunk.begin ? value : Input(row);
      }
    }
  }
};

KVANTA_DEVICE void RunBlock(const CausalConvOp& op) {
  const int64_t blocks = CeilDiv(op.channels, int64_t{kRowThreads});
  const int64_t channel = BlockIndex() % blocks * kRowThreads + ThreadIndex();
  const ConvChunk chunk = FindChunk(*op.states.table, BlockIndex() / blocks);
  if (chunk.end_segment == 0 || channel >= op.channels) return;
  const ConvChannel conv(op, chunk, channel);
  if (op.out != nullptr) conv.ComputeRows();
  if (chunk.index == 0) conv.StoreStates();
}

}  // namespace kvanta::kernels::cuda
