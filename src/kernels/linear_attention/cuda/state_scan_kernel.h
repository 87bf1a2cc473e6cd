// Recurrences of Gated DeltaNet, Kimi Delta Attention and Mamba-2, token after token: a row's bits do not depend on how
// tokens are divided into steps. Include the primitives first.
#pragma once

#include "kernels/linear_attention/cuda/causal_conv_kernel.h"

namespace kvanta::kernels::cuda {

// A block has columns of one head's state S for all tokens of a sequence, in registers: a column belongs to four lanes
// of a warp, 8 apart; of 16 rows, each has 4 adjacent ones.
inline constexpr int kScanWarps = 4;
inline constexpr int kScanColumns = 8 * kScanWarps;
inline constexpr int kScanGroupRows = 16;
inline constexpr int kScanTokens = 8;  // whose k, q, v and gates are staged in shared memory
inline constexpr float kKeyNormEps = 1e-6F;

// PyTorch's softplus, with its threshold.
KVANTA_DEVICE float Softplus(float x) {
  return x > 20.0F ? x : log1pf(expf(x));
}

// kGroups: groups of rows that registers hold, at least those of S.
template <int kGroups, StateRule kRule>
struct ScanBlock {
  static constexpr bool kIsDelta = kRule != StateRule::kMamba2;
  static constexpr bool kDecaysByChannel = kRule == StateRule::kChannelDelta;

  const StateScanOp& op;
  int64_t head, key_head;
  int column;  // of this thread
  int lane, warp, part;
  int rows;  // of S, padded with zeros to whole groups
  // Places in shared memory, of [kScanTokens][...] floats.
  int keys, queries, values, decays, betas;
  float state[kGroups][4] = {};

  KVANTA_DEVICE ScanBlock(const StateScanOp& scan, int64_t head_index, int first_column)
      : op(scan),
        head(head_index),
        key_head(op.tiled_heads ? head % op.key_heads : head / (op.heads / op.key_heads)),
        lane(ThreadIndex() % kWarp),
        warp(ThreadIndex() / kWarp),
        part(lane / 8),
        rows(static_cast<int>(RoundUp(op.state_rows, kScanGroupRows))) {
    column = first_column + 8 * warp + lane % 8;
    keys = 0;
    queries = keys + 4 * kScanTokens * rows;
    values = queries + 4 * kScanTokens * rows;
    decays = values + 4 * kScanTokens * kScanColumns;
    betas = decays + 4 * kScanTokens * DecayStride();
  }

  KVANTA_DEVICE int DecayStride() const { return kDecaysByChannel ? rows : 1; }

  // Calls visit(float of `record`, element) for this thread's elements of S.
  template <class T, class Visit>
  KVANTA_DEVICE void ForElements(T* record, Visit visit) {
    if (record == nullptr || column >= op.state_columns) return;
    T* s = record + head * op.state_rows * op.state_columns + column;
    KVANTA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = group * kScanGroupRows + 4 * part + i;
        if (row < op.state_rows) visit(s[int64_t{row} * op.state_columns], state[group][i]);
      }
    }
  }

  // Stages a vector of a token by a warp, normed to length `scale` by the delta rule.
  KVANTA_DEVICE void StageVector(const float* from, float scale, int to) const {
    float factor = 1;
    if constexpr (kIsDelta) {
      float squares = 0;
      for (int i = lane; i < op.state_rows; i += kWarp) squares = MultiplyAdd(from[i], from[i], squares);
      for (int mask = kWarp / 2; mask > 0; mask /= 2) squares += ShuffleXor(squares, mask);
      factor = scale / SquareRoot(squares + kKeyNormEps);
    }
    for (int i = lane; i < rows; i += kWarp) StoreShared(to + 4 * i, i < op.state_rows ? from[i] * factor : 0.0F);
  }

  // Stages the decay of a head, and beta or dt.
  KVANTA_DEVICE void StageGates(int64_t row, int token) const {
    const float* gates = op.gates + row * op.gates_stride;
    const float b = gates[op.b.At(head)];
    if constexpr (!kIsDelta) {
      float dt = Softplus(b * op.dt_scale + op.dt_bias[head]);
      dt = fminf(fmaxf(dt, op.min_dt), op.max_dt);
      StoreShared(betas + 4 * token, dt);
      StoreShared(decays + 4 * token, expf(op.rates[head] * dt));
      return;
    }
    StoreShared(betas + 4 * token, 1.0F / (1.0F + expf(-b)));
    if (kDecaysByChannel) return;
    StoreShared(decays + 4 * token, expf(op.rates[head] * Softplus(gates[op.a.At(head)] + op.dt_bias[head])));
  }

  KVANTA_DEVICE float ChannelDecay(float x) const {
    const float rate = op.rates[head];
    return expf(op.lower_bound == 0 ? rate * Softplus(x) : op.lower_bound / (1.0F + expf(rate * x)));
  }

  KVANTA_DEVICE void Stage(int64_t first_row, int tokens) const {
    const float query_scale = 1.0F / SquareRoot(static_cast<float>(op.state_rows));
    for (int token = warp; token < tokens; token += kScanWarps) {
      const float* mixed = op.mixed + (first_row + token) * op.mixed_stride;
      StageVector(mixed + op.k + key_head * op.state_rows, 1.0F, keys + 4 * token * rows);
      StageVector(mixed + op.q + key_head * op.state_rows, query_scale, queries + 4 * token * rows);
      const int64_t own = column - 8 * warp - lane % 8 + lane;
      StoreShared(values + 4 * (token * kScanColumns + lane),
                  own < op.state_columns ? mixed[op.v + head * op.state_columns + own] : 0.0F);
      if (!kDecaysByChannel) continue;
      const float* gates = op.channel_gates + (first_row + token) * op.channel_gates_stride + head * op.state_rows;
      const float* bias = op.dt_bias + head * op.state_rows;
      for (int i = lane; i < rows; i += kWarp) {
        StoreShared(decays + 4 * (token * rows + i), i < op.state_rows ? ChannelDecay(gates[i] + bias[i]) : 0.0F);
      }
    }
    if (ThreadIndex() < tokens) StageGates(first_row + ThreadIndex(), ThreadIndex());
  }

  static KVANTA_DEVICE float SumOfColumn(const float (&sums)[4]) {
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    sum += ShuffleXor(sum, 8);
    return sum + ShuffleXor(sum, 16);
  }
  static KVANTA_DEVICE void LoadFour(int at, float (&x)[4]) {
    const auto four = LoadShared<Vec4>(at);
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = std::bit_cast<float>(four.word[i]);
  }

  // One token; returns the output in all lanes of the column.
  KVANTA_DEVICE float Advance(int token) {
    const auto value = LoadShared<float>(values + 4 * (token * kScanColumns + 8 * warp + lane % 8));
    const auto beta = LoadShared<float>(betas + 4 * token);
    const float decay = kDecaysByChannel ? 0.0F : LoadShared<float>(decays + 4 * token);
    const int first = 4 * (token * rows + 4 * part);  // of this thread's rows
    float k[4], q[4], factors[4] = {decay, decay, decay, decay};
    float added = value * beta;
    if constexpr (kIsDelta) {
      float sums[4] = {};
      KVANTA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        if (group * kScanGroupRows >= rows) break;
        LoadFour(keys + first + 4 * group * kScanGroupRows, k);
        if (kDecaysByChannel) LoadFour(decays + first + 4 * group * kScanGroupRows, factors);
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          sums[i] = MultiplyAdd(state[group][i], kDecaysByChannel ? k[i] * factors[i] : k[i], sums[i]);
        }
      }
      const float known = SumOfColumn(sums);
      added = (value - (kDecaysByChannel ? known : decay * known)) * beta;
    }
    float sums[4] = {};
    KVANTA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      if (group * kScanGroupRows >= rows) break;
      LoadFour(keys + first + 4 * group * kScanGroupRows, k);
      LoadFour(queries + first + 4 * group * kScanGroupRows, q);
      if (kDecaysByChannel) LoadFour(decays + first + 4 * group * kScanGroupRows, factors);
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        state[group][i] = MultiplyAdd(k[i], added, state[group][i] * factors[i]);
        sums[i] = MultiplyAdd(state[group][i], q[i], sums[i]);
      }
    }
    const float out = SumOfColumn(sums);
    return kIsDelta ? out : MultiplyAdd(op.d[head], value, out);
  }

  KVANTA_DEVICE void Run(int64_t sequence) {
    const cache::StateTable table = *op.states.table;
    const int32_t begin = table.first_segments[sequence], end = table.first_segments[sequence + 1];
    ForElements(StateOf(op.states, table.segments[begin].from), [](const float& from, float& to) { to = from; });
    for (int32_t index = begin; index < end; ++index) {
      const cache::StateSegment segment = table.segments[index];
      for (int first = 0; first < segment.tokens; first += kScanTokens) {
        const int tokens = segment.tokens - first < kScanTokens ? segment.tokens - first : kScanTokens;
        SyncBlock();  // the staged tokens before have been read
        Stage(segment.first_row + first, tokens);
        SyncBlock();
        for (int token = 0; token < tokens; ++token) {
          const float out = Advance(token);
          if (part != 0 || column >= op.state_columns) continue;
          op.out[((segment.first_row + first + token) * op.heads + head) * op.state_columns + column] = out;
        }
      }
      ForElements(StateOf(op.states, segment.to), [](float& to, const float& from) { to = from; });
    }
  }
};

template <int kGroups, StateRule kRule>
struct ScanKernel {
  static constexpr int kThreads = kScanWarps * kWarp;

  static LaunchShape Shape(const StateScanOp& op) {
    const int64_t columns = CeilDiv(int64_t{op.state_columns}, int64_t{kScanColumns});
    const int rows = static_cast<int>(RoundUp(op.state_rows, kScanGroupRows));
    const int decays = kRule == StateRule::kChannelDelta ? rows : 1;
    return {op.states.max_sequences * op.heads * columns, kThreads,
            4 * kScanTokens * (2 * rows + kScanColumns + decays + 1)};
  }
  static KVANTA_DEVICE void Run(const StateScanOp& op) {
    const int columns = static_cast<int>(CeilDiv(int64_t{op.state_columns}, int64_t{kScanColumns}));
    const int64_t sequence = BlockIndex() / columns / op.heads;
    if (sequence >= op.states.table->sequences) return;
    const int64_t head = BlockIndex() / columns % op.heads;
    ScanBlock<kGroups, kRule>(op, head, BlockIndex() % columns * kScanColumns).Run(sequence);
  }
};

// Calls launcher.Launch<Kernel>(op). One kernel for all would spill registers.
template <StateRule kRule, class Launcher>
void LaunchScanOfRule(const StateScanOp& op, Launcher launcher) {
  constexpr int kFewGroups = 128 / kScanGroupRows;
  if (op.state_rows <= kFewGroups * kScanGroupRows) {
    launcher.template Launch<ScanKernel<kFewGroups, kRule>>(op);
  } else {
    launcher.template Launch<ScanKernel<kMaxDeltaHeadDim / kScanGroupRows, kRule>>(op);
  }
}
template <class Launcher>
void LaunchScanKernel(const StateScanOp& op, Launcher launcher) {
  switch (op.rule) {
    case StateRule::kDelta:
      return LaunchScanOfRule<StateRule::kDelta>(op, launcher);
    case StateRule::kChannelDelta:
      return LaunchScanOfRule<StateRule::kChannelDelta>(op, launcher);
    case StateRule::kMamba2:
      return LaunchScanOfRule<StateRule::kMamba2>(op, launcher);
  }
}

}  // namespace kvanta::kernels::cuda
