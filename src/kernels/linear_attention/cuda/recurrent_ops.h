// Arguments of the operations of recurrent layers on a GPU: plain data. All pointers are to device memory.
#pragma once

#include <cstdint>
#include <limits>

#include "cache/recurrent_state.h"
#include "kernels/linear_attention/causal_conv.h"
#include "kernels/linear_attention/gated_delta_net.h"

namespace kvanta::kernels::cuda {

// A layer's states in the records, and the step's segments.
struct DeviceStates {
  const cache::StateTable* table = nullptr;
  int64_t max_sequences = 0;
  uint8_t* base = nullptr;
  int64_t record_bytes = 0;
};

inline DeviceStates DeviceStatesOf(const cache::StateStep& states) noexcept {
  return {.table = states.table,
          .max_sequences = states.max_sequences,
          .base = states.base,
          .record_bytes = states.record_bytes};
}

// Places of the convolution's channels in a row: those of q | k | v of each head of keys, `stride` floats apart; 0: one
// after the other.
struct KeyHeadGroups {
  int64_t stride = 0;
  int64_t key_width = 0;    // channels of q, and of k, of all heads
  int64_t k_dim = 0;        // of one head
  int64_t value_width = 0;  // of the values that share a head of keys

  constexpr int64_t At(int64_t channel) const noexcept {
    if (stride == 0) return channel;
    if (channel < key_width) return channel / k_dim * stride + channel % k_dim;
    channel -= key_width;
    if (channel < key_width) return channel / k_dim * stride + k_dim + channel % k_dim;
    channel -= key_width;
    return channel / value_width * stride + 2 * k_dim + channel % value_width;
  }
};

// Causal depthwise convolution, and the last inputs of each segment into the states.
struct CausalConvOp {
  DeviceStates states;
  int64_t state_offset = 0;  // floats of a state before the inputs, [taps - 1][channels]
  int64_t rows = 0;
  const float* input = nullptr;  // rows `stride` floats apart
  int64_t stride = 0;
  KeyHeadGroups groups;
  int64_t channels = 0;
  int32_t taps = 0;                // at most kMaxConvWidth
  const float* weights = nullptr;  // [taps][channels]
  const float* bias = nullptr;     // [channels]; null: none
  bool silu = false;
  const float* gate = nullptr;  // factors of the output, rows `stride` floats apart; null: none
  float* out = nullptr;         // [rows][channels]; null: the states alone
};

enum class StateRule : uint8_t {
  kDelta,         // S = decay S + k (beta (v - (decay S)^T k))^T, of normed q and k
  kChannelDelta,  // the same with a decay of each row of S
  kMamba2,        // S = decay S + k (dt v)^T; the output has d v in addition
};

// A recurrence over the tokens of each sequence, whose output is S^T q.
struct StateScanOp {
  DeviceStates states;
  StateRule rule = StateRule::kDelta;
  int32_t heads = 0;
  int32_t state_rows = 0;     // of S: channels of k and q
  int32_t state_columns = 0;  // of S: channels of v
  int32_t key_heads = 0;      // heads of q and k; a divisor of heads
  bool tiled_heads = false;   // heads that share one are key_heads apart; else adjacent
  // Rows of the convolution's output: q, k and v of the first head.
  const float* mixed = nullptr;
  int64_t mixed_stride = 0;
  int64_t q = 0, k = 0, v = 0;
  // Inputs of beta and of the decay (kMamba2: dt, which both are computed from).
  const float* gates = nullptr;
  int64_t gates_stride = 0;
  HeadOffsets b, a;
  const float* channel_gates = nullptr;  // kChannelDelta, in place of a: [rows][heads * state_rows]
  int64_t channel_gates_stride = 0;
  const float* dt_bias = nullptr;  // [heads], kChannelDelta: [heads * state_rows]
  const float* rates = nullptr;    // [heads]: the decay's logarithm is rate * softplus
  float lower_bound = 0;           // kChannelDelta, unless 0: it is lower_bound * sigmoid of -rate
  const float* d = nullptr;        // [heads], of kMamba2
  float dt_scale = 1, min_dt = 0, max_dt = std::numeric_limits<float>::infinity();
  float* out = nullptr;  // [rows][heads * state_columns]
};

// x = norm(x) * activation(gate), or norm(x * activation(gate)), for groups of channels of each row.
struct GatedNormOp {
  float* x = nullptr;  // [rows][groups * width]
  int64_t rows = 0;
  int64_t groups = 0;
  int64_t width = 0;
  const float* gates = nullptr;
  int64_t gates_stride = 0;
  HeadOffsets gate;  // each group's
  float gate_scale = 1;
  bool silu = true;               // else the activation is a sigmoid
  const float* weight = nullptr;  // of the RMS norm; null: none
  int64_t weight_stride = 0;      // between the groups'; 0: all have one
  bool norms_gated_values = false;
  float eps = 0;
};

}  // namespace kvanta::kernels::cuda
