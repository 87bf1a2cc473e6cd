// Blocks of attention: a tile and a run each, and the merge of a tile's runs. A unit that includes this has included
// the primitives.
#pragma once

#include "formats/bf16.h"
#include "kernels/cuda/attention_kernel.h"

namespace kvanta::kernels::cuda {

template <class KeyFormat, class ValueFormat, int kDim>
struct AttendBlock {
  using Keys = SideTraits<KeyFormat>;
  using Values = SideTraits<ValueFormat>;
  using Exact = SideTraits<formats::Bf16>;
  using Stored = ChunkAttention<Keys, Values, kDim>;
  using Open = ChunkAttention<Exact, Exact, kDim>;
  using State = TileState<kDim>;
  static_assert(kDim % 16 == 0 && kDim <= 256);
  // A layer of bf16 alone has nothing else to read.
  static constexpr bool kHasExact = Keys::kCode != Code::kBf16 || Values::kCode != Code::kBf16;

  // Shared memory. The warps' results lie where the query rows were.
  static constexpr int kResultBytes = kAttendWarps * kQueryRows * kDim * 4;
  static constexpr int kRows = 0;
  static constexpr int kResults = 0;
  static constexpr int kScales = kResultBytes;
  static constexpr int kBias = kScales + 4 * kQueryRows;
  static constexpr int kStates = kBias + 4 * kQueryRows;
  static constexpr int kQueries = kStates + kAttendWarps * kQueryRows * 8;
  static constexpr int kExactQueries = kQueries + KeySteps<Keys::kCode, kDim>::kBytes;
  static constexpr int kSharedBytes = kExactQueries + (kHasExact ? KeySteps<Code::kBf16, kDim>::kBytes : 0);

  static KVANTA_DEVICE void Run(const AttendLayer& layer) {
    for (int task = BlockIndex(); task < layer.task_count; task += Blocks()) {
      const RunTask runs = layer.tasks[task];
      const QueryTile tile = layer.tiles[runs.tile];
      QueryRows<kDim>::Load(layer, tile, kRows, kScales, kBias);
      SyncBlock();
      QueryRows<kDim>::template Pack<Keys::kCode>(kRows, kScales, kQueries);
      if (kHasExact && layer.exact.base != nullptr) {
        QueryRows<kDim>::template Pack<Code::kBf16>(kRows, kScales, kExactQueries);
      }
      SyncBlock();
      for (int run = runs.first_run; run < runs.last_run; ++run) {
        AttendQuarter(layer, tile, run);
        SyncBlock();
        MergeQuarters(layer, tile, runs.slot, run == runs.first_run);
        SyncBlock();
      }
    }
  }

 private:
  static KVANTA_DEVICE void AttendQuarter(const AttendLayer& layer, const QueryTile& tile, int run) {
    const int lane = ThreadIndex() % kWarp;
    const int quarter = ThreadIndex() / kWarp;
    State state;
    KVANTA_UNROLL
    for (int i = 0; i < 4 * State::kBlocks; ++i) {
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) state.out[i][e] = 0;
    }
    float stored_scale[2];
    float exact_scale[2];
    float bias[2];
    int tokens[2];  // of rows g and g + 8: which of the tile's; the tile's number for rows that it lacks
    const float log = layer.softcap > 0 ? 1.0F : kLog2E;
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int r = lane / 4 + 8 * row;
      tokens[row] = r / tile.heads;
      state.peak[row] = kMinusInfinity;
      state.sum[row] = 0;
      state.exponent[row] = Values::kCode == Code::kBf16 ? kTopExponent : kLeastExponent;
      const float scale = layer.softmax_scale * log;
      const float query = CodeOperand<Keys::kCode>::kBf16 ? 1.0F : LoadShared<float>(kScales + 4 * r);
      stored_scale[row] = query * (scale * (layer.k_scale[tile.kv_head] * OperandUnit<Keys>()));
      exact_scale[row] = scale;
      bias[row] = LoadShared<float>(kBias + 4 * r) * layer.softmax_scale;
    }
    const float value_scale = layer.v_scale[tile.kv_head] * OperandUnit<Values>();

    const int64_t last = int64_t{tile.first} + tile.tokens - 1;
    const int64_t own_page = tile.first / layer.page_size;
    const int64_t visible = layer.sliding_window > 0 && tile.first >= layer.sliding_window
                                ? int64_t{tile.first} - layer.sliding_window + 1
                                : 0;
    const int64_t begin = int64_t{run} * kRunTokens + quarter * kQuarterTokens;
    for (int64_t position = begin; position < begin + kQuarterTokens && position <= last; position += kChunkTokens) {
      if (position + kChunkTokens <= visible) continue;
      const int64_t page = position / layer.page_size;
      const PageIds ids = layer.pages[tile.pages + page];
      ChunkView chunk;
      chunk.slot = static_cast<int>(position % layer.page_size);
      chunk.whole = true;
      for (int token = 0; token<tile.tokens; token += tile.tokens> 1 ? tile.tokens - 1 : 1) {
        int from = 0;
        int to = 0;
        Stored::Seen(layer, tile.first + token, position, from, to);
        chunk.whole = chunk.whole && from == 0 && to == kChunkTokens;
      }
      KVANTA_UNROLL
      for (int row = 0; row < 2; ++row) {
        chunk.begin[row] = chunk.end[row] = 0;
        if (tokens[row] < tile.tokens) {
          Stored::Seen(layer, tile.first + tokens[row], position, chunk.begin[row], chunk.end[row]);
        }
      }
      const bool exact = page > own_page - layer.exact_pages || page < layer.exact_sinks;
      if (kHasExact && exact) {
        if constexpr (kHasExact) {
          const uint8_t* record = layer.exact.base + ids.exact * layer.exact.bytes;
          chunk.keys = record + layer.exact_k.first + tile.kv_head * layer.exact_k.stride;
          chunk.values = record + layer.exact_v.first + tile.kv_head * layer.exact_v.stride;
          Open::Attend(layer, layer.exact_k, layer.exact_v, tile, chunk, position, kExactQueries, exact_scale, bias,
                       1.0F, lane, state);
        }
      } else {
        const Records& records = exact ? layer.exact : layer.quantized;
        const CellPlace& k = exact ? layer.exact_k : layer.k;
        const CellPlace& v = exact ? layer.exact_v : layer.v;
        const uint8_t* record = records.base + (exact ? ids.exact : ids.quantized) * records.bytes;
        chunk.keys = record + k.first + tile.kv_head * k.stride;
        chunk.values = record + v.first + tile.kv_head * v.stride;
        Stored::Attend(layer, k, v, tile, chunk, position, kQueries, stored_scale, bias, value_scale, lane, state);
      }
    }
    StoreQuarter(state, quarter, lane);
  }

  static KVANTA_DEVICE void StoreQuarter(State& state, int quarter, int lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      state.sum[row] += ShuffleXor(state.sum[row], 1);
      state.sum[row] += ShuffleXor(state.sum[row], 2);
      const int at = quarter * kQueryRows + g + 8 * row;
      if (t == 0) StoreShared(kStates + at * 8, Words2{{Bits(state.peak[row]), Bits(state.sum[row])}});
      const float unit = PowerOfTwo(state.exponent[row] - kTopExponent);
      KVANTA_UNROLL
      for (int i = 0; i < 4 * State::kBlocks; ++i) {
        KVANTA_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int channel = i / 4 * 32 + 8 * t + 4 * e + i % 4;
          if (channel < kDim) StoreShared(kResults + (at * kDim + channel) * 4, state.out[i][2 * row + e] * unit);
        }
      }
    }
  }

  // The run's result, into the task's so far. Elements stay with their thread; what they share is written after all
  // have read it.
  static KVANTA_DEVICE void MergeQuarters(const AttendLayer& layer, const QueryTile& tile, int slot, bool first) {
    const int rows = tile.tokens * tile.heads;
    float* const states = layer.partial_state + int64_t{slot} * 2;
    for (int i = ThreadIndex(); i < rows * kDim; i += kAttendWarps * kWarp) {
      const int row = i / kDim;
      float peak = kMinusInfinity;
      float sum = 0;
      float out = 0;
      for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
        const int at = quarter * kQueryRows + row;
        const auto state = LoadShared<Words2>(kStates + at * 8);
        const auto x = LoadShared<float>(kResults + (at * kDim + i % kDim) * 4);
        MergeInto(peak, sum, std::bit_cast<float>(state.word[0]), std::bit_cast<float>(state.word[1]), &out, &x, 1);
      }
      float* const total = layer.partial_out + (int64_t{slot} + row) * kDim + i % kDim;
      if (!first) {
        float total_peak = states[2 * row];
        float total_sum = states[2 * row + 1];
        float value = *total;
        MergeInto(total_peak, total_sum, peak, sum, &value, &out, 1);
        out = value;
      }
      *total = out;
    }
    SyncBlock();
    for (int row = ThreadIndex(); row < rows; row += kAttendWarps * kWarp) {
      float peak = first ? kMinusInfinity : states[2 * row];
      float sum = first ? 0.0F : states[2 * row + 1];
      float run_peak = kMinusInfinity;
      float run_sum = 0;
      for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
        const auto state = LoadShared<Words2>(kStates + (quarter * kQueryRows + row) * 8);
        MergeInto(run_peak, run_sum, std::bit_cast<float>(state.word[0]), std::bit_cast<float>(state.word[1]), nullptr,
                  nullptr, 0);
      }
      MergeInto(peak, sum, run_peak, run_sum, nullptr, nullptr, 0);
      states[2 * row] = peak;
      states[2 * row + 1] = sum;
    }
  }

  static KVANTA_DEVICE uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }

 public:
  // (peak, sum, out) and (more_peak, more_sum, more) of `count` values, into the first.
  static KVANTA_DEVICE void MergeInto(float& peak, float& sum, float more_peak, float more_sum, float* out,
                                      const float* more, int count) {
    const float greatest = fmaxf(peak, more_peak);
    const float base = greatest == kMinusInfinity ? 0.0F : greatest;
    const float keep = Exp2(peak - base);
    const float take = Exp2(more_peak - base);
    peak = greatest;
    sum = MultiplyAdd(sum, keep, more_sum * take);
    for (int i = 0; i < count; ++i) out[i] = MultiplyAdd(out[i], keep, more[i] * take);
  }
};

inline constexpr int kMergeWarps = 4;
inline constexpr int kMergeBytes = 4 * 256;  // of a warp: a row

// A warp for each row of each tile: its partial results in ascending order, divided by the weights' sum, and
// transformed back.
KVANTA_DEVICE void MergeBlock(const AttendLayer& layer) {
  const int lane = ThreadIndex() % kWarp;
  const int warp = ThreadIndex() / kWarp;
  const int item = BlockIndex() * kMergeWarps + warp;
  if (item >= layer.tile_count * kQueryRows) return;
  const QueryTile tile = layer.tiles[item / kQueryRows];
  const int row = item % kQueryRows;
  if (row >= tile.tokens * tile.heads) return;
  constexpr int kPerLane = 8;
  float out[kPerLane] = {};
  float peak = kMinusInfinity;
  float sum = 0;
  for (int part = 0; part < tile.parts; ++part) {
    const int slot = tile.slot + part * kQueryRows + row;
    const float* from = layer.partial_out + int64_t{slot} * layer.head_dim;
    float more[kPerLane];
    KVANTA_UNROLL
    for (int i = 0; i < kPerLane; ++i) more[i] = lane + 32 * i < layer.head_dim ? from[lane + 32 * i] : 0.0F;
    AttendBlock<formats::Bf16, formats::Bf16, 64>::MergeInto(peak, sum, layer.partial_state[int64_t{2} * slot],
                                                             layer.partial_state[int64_t{2} * slot + 1], out, more,
                                                             kPerLane);
  }
  const int base = warp * kMergeBytes;
  KVANTA_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < layer.head_dim) StoreShared(base + 4 * (lane + 32 * i), out[i] / sum);
  }
  SyncWarp();
  if (layer.v_hadamard) HadamardRow(base, layer.head_dim, layer.hadamard_block, layer.hadamard_norm, lane);
  const int head = tile.first_head + row % tile.heads;
  float* to = layer.out + ((tile.row + row / tile.heads) * int64_t{layer.heads} + head) * layer.head_dim;
  for (int c = lane; c < layer.head_dim; c += kWarp) to[c] = LoadShared<float>(base + 4 * c);
}

}  // namespace kvanta::kernels::cuda
