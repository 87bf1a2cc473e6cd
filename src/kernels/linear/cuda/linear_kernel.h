// y = x W^T + b on tensor cores. W is on M (16 rows per panel), rows of x on N (tiles of 8), so that a decode step of
// up to 8 rows wastes no products. Include the primitives first.
//
// The 8 warps of a block split the units of the same panels and rows and sum up in order at the end. That order, and
// the order of units in a warp, depend on `in` alone: a row's bits depend neither on the number of rows nor on the
// tile. Weights are loaded directly to registers, every byte once, in whole cache lines.
#pragma once

#include "kernels/cuda/gated_activation.h"
#include "kernels/linear/cuda/pack_row.h"
#include "kernels/linear/cuda/weight_panels.h"

namespace kvanta::kernels::cuda {

inline constexpr int kLinearWarps = 8;

// Layer of row tile `tile` in a group; -1 if the tile is not used.
KVANTA_DEVICE int64_t MemberOf(const LinearOp& op, int64_t tile) {
  if (op.tile_members != nullptr) return op.tile_members[tile];
  return tile * RowsOf(op.tile) / op.grouped.padded_rows;
}
// W for row tile `tile`; null if the tile is not used.
KVANTA_DEVICE const uint8_t* WeightsFor(const LinearOp& op, int64_t tile) {
  if (op.group == nullptr) return op.weight.data;
  const int64_t member = MemberOf(op, tile);
  return member < 0 ? nullptr : op.group[member];
}
// Bias for row tile `tile`, which is used; null without one.
KVANTA_DEVICE const float* BiasFor(const LinearOp& op, int64_t tile) {
  if (op.group == nullptr) return op.weight.bias;
  return op.group_bias == nullptr ? nullptr : op.group_bias[MemberOf(op, tile)];
}

// Row `row` of y; null for padding.
KVANTA_DEVICE float* OutputRow(const LinearOp& op, int64_t row) {
  if (op.grouped.padded_rows == 0) return op.y + row * op.y_stride;
  const int64_t in_member = row % op.grouped.padded_rows;
  if (in_member >= op.grouped.used_rows) return nullptr;
  return op.y + row / op.grouped.padded_rows * op.y_member_stride + in_member * op.y_stride;
}

// Adds the products of a unit's panel rows g (elements 0, 1) and g + 8 (2, 3) with two rows of x. a: operands of both
// steps of 16 channels; x: those of x.
template <class Panel>
KVANTA_DEVICE void AddProducts(const typename Panel::Raw& raw, const Vec4 (&a)[2], const Vec4& x, const Vec2& row_sums,
                               float (&sums)[4]) {
  if constexpr (!Panel::kScaled) {
    Panel::Multiply(sums, a[0], x.word[0], x.word[1]);
    Panel::Multiply(sums, a[1], x.word[2], x.word[3]);
  } else {
    KVANTA_UNROLL
    for (int part = 0; part < Panel::kScales; ++part) {
      float dots[4] = {};
      KVANTA_UNROLL
      for (int step = part; step < (Panel::kScales == 1 ? 2 : part + 1); ++step) {
        Panel::Multiply(dots, a[step], x.word[2 * step], x.word[2 * step + 1]);
      }
      const float scale[2] = {Panel::Scale(raw, part, 0), Panel::Scale(raw, part, 1)};
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) sums[i] = MultiplyAdd(scale[i / 2], dots[i], sums[i]);
    }
  }
  if constexpr (Panel::kHasMinimum) {
    const float minimum[2] = {Panel::Minimum(raw, 0), Panel::Minimum(raw, 1)};
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      sums[i] = MultiplyAdd(minimum[i / 2], std::bit_cast<float>(row_sums.word[i % 2]), sums[i]);
    }
  }
}

// Packs the outputs of gated layers, by the launch's last block.
KVANTA_DEVICE_CALL void PackGatedRows(const LinearOp& op) {
  if (!IsLastToArrive(op.gated.finished_blocks, Blocks())) return;
  for (int64_t row = 0; row < op.rows; ++row) {
    const float* const x = op.gated.out + row * op.gated.width;
    PackRow<kLinearWarps>(op.gated.pack.kind, op.gated.pack.out, row, op.gated.width,
                          [x](int64_t k) { return LoadFresh(x + k); });
    SyncBlock();
  }
}

template <class Panel, ProductTile kTile>
struct LinearBlock {
  static constexpr int kThreads = kLinearWarps * kWarp;
  static constexpr int kBlocksPerSm = 1;  // at least
  static constexpr int kPanels = PanelsOf(kTile);
  static constexpr int kRowTiles = RowTilesOf(kTile);
  // Panels of gates; as many of what they multiply follow, at a distance of op.gated.width.
  static constexpr int kGatePanels = kPanels / 2;
  static constexpr int kOuts = kPanels * kPanelRows;
  static constexpr int kRows = kRowTiles * kRowTile;
  static constexpr int kRounds = kRows > 32 ? 2 : 1;  // rounds of the reduction; two halve its shared memory
  static constexpr int kRoundTiles = kRowTiles / kRounds;
  static constexpr int kRoundRows = kRows / kRounds;
  static constexpr int kStride = kOuts + 4;  // floats per row of sums, padded against bank conflicts
  static constexpr int kWarpBytes = 4 * kRoundRows * kStride;
  static constexpr int kSharedBytes = kLinearWarps * kWarpBytes;
  // Units in flight per warp: about 2 KiB in decode; large tiles have no registers for more.
  static constexpr bool kRowsAhead = kRowTiles == 1;
  static constexpr int kAhead = kPanels > 2                     ? 1
                                : !kRowsAhead                   ? 2
                                : CodeBitsOf(Panel::kKind) == 4 ? 8 / kPanels
                                                                : 4 / kPanels;

  struct Loaded {
    typename Panel::Raw w[kPanels];
    Vec4 x[1];  // if kRowsAhead
  };
  using Sums = float[kPanels][kRowTiles][4];

  static constexpr LaunchShape Shape(const LinearOp& op) {
    const int64_t columns = CeilDiv(op.weight.out, kOuts);
    return {columns * CeilDiv(op.rows, kRows), kThreads, kSharedBytes};
  }

  static KVANTA_DEVICE void Run(const LinearOp& op) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    // Adjacent blocks share W, so it is read once into the L2 cache for all rows.
    const auto row_blocks = static_cast<int>(CeilDiv(op.rows, kRows));
    const bool is_gated = kGatePanels > 0 && op.gated.width != 0;
    const int64_t first_panel = int64_t{BlockIndex() / row_blocks} * (is_gated ? kGatePanels : kPanels);
    const int64_t half = is_gated ? op.gated.width / kPanelRows : kGatePanels;  // from the first panels to the others
    const int64_t first_tile = int64_t{BlockIndex() % row_blocks} * kRowTiles;
    const uint8_t* data = WeightsFor(op, BlockIndex() % row_blocks);
    if (data == nullptr) return;
    const float* bias = BiasFor(op, BlockIndex() % row_blocks);
    const int64_t units = op.weight.Units();
    const int64_t share = CeilDiv(units, kLinearWarps);
    const int64_t begin = warp * share;
    const int64_t end = begin + share < units ? begin + share : units;

    Sums sums = {};
    Loaded ahead[kAhead];
    const auto load = [&](Loaded& to, int64_t unit) {
      Load(op, data, first_panel, half, first_tile, units, unit, lane, to);
    };
    KVANTA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i < end) load(ahead[i], begin + i);
    }
    for (int64_t unit = begin; unit < end; unit += kAhead) {
      KVANTA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (unit + i >= end) break;
        Multiply(op, first_tile, units, unit + i, lane, ahead[i], sums);
        if (unit + i + kAhead < end) load(ahead[i], unit + i + kAhead);
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      if (round > 0) SyncBlock();
      StoreSums(sums, round, warp, lane);
      SyncBlock();
      const int64_t first_out = first_panel * kPanelRows, first_row = first_tile * kRowTile + round * kRoundRows;
      if constexpr (kGatePanels > 0) {
        if (is_gated) {
          ReduceGated(op, data, bias, first_out, first_row);
          continue;
        }
      }
      ReduceSums(op, data, bias, first_out, first_row);
    }
    if (is_gated && op.gated.finished_blocks != nullptr) PackGatedRows(op);
  }

 private:
  static KVANTA_DEVICE const uint8_t* RowsAt(const LinearOp& op, int64_t tile, int64_t units, int64_t unit, int lane) {
    return op.x.codes + ((tile * units + unit) * kWarp + lane) * 16;
  }

  static KVANTA_DEVICE void Load(const LinearOp& op, const uint8_t* data, int64_t first_panel, int64_t half,
                                 int64_t first_tile, int64_t units, int64_t unit, int lane, Loaded& to) {
    KVANTA_UNROLL
    for (int i = 0; i < kPanels; ++i) {
      const int64_t panel = first_panel + (i < kGatePanels ? i : i - kGatePanels + half);
      to.w[i] = Panel::Load({op.weight, data, panel, unit}, lane);
    }
    if constexpr (kRowsAhead) to.x[0] = LoadVec4(RowsAt(op, first_tile, units, unit, lane));
  }

  // Multiplies one unit: two steps of 16 channels.
  static KVANTA_DEVICE void Multiply(const LinearOp& op, int64_t first_tile, int64_t units, int64_t unit, int lane,
                                     const Loaded& loaded, Sums& sums) {
    Vec4 a[kPanels][2];
    KVANTA_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      a[panel][0] = Panel::Operand(loaded.w[panel], 0);
      a[panel][1] = Panel::Operand(loaded.w[panel], 1);
    }
    KVANTA_UNROLL
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const Vec4 x = kRowsAhead ? loaded.x[0] : LoadVec4(RowsAt(op, first_tile + tile, units, unit, lane));
      Vec2 row_sums = {};
      if constexpr (Panel::kHasMinimum) {
        row_sums = LoadVec2(reinterpret_cast<const uint8_t*>(
            op.x.unit_sums + ((first_tile + tile) * units + unit) * kRowTile + lane % 4 * 2));
      }
      KVANTA_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        AddProducts<Panel>(loaded.w[panel], a[panel], x, row_sums, sums[panel][tile]);
      }
    }
  }

  static KVANTA_DEVICE int SumAt(int warp, int row, int out) { return warp * kWarpBytes + 4 * (row * kStride + out); }

  static KVANTA_DEVICE void StoreSums(const Sums& sums, int round, int warp, int lane) {
    KVANTA_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      KVANTA_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        if (tile / kRoundTiles != round) continue;  // keeps the register index a compile-time constant
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          StoreShared(SumAt(warp, tile % kRoundTiles * kRowTile + lane % 4 * 2 + i % 2,
                            panel * kPanelRows + lane / 4 + i / 2 * 8),
                      sums[panel][tile][i]);
        }
      }
    }
  }

  static KVANTA_DEVICE void ReduceSums(const LinearOp& op, const uint8_t* data, const float* bias, int64_t first_out,
                                       int64_t first_row) {
    for (int i = ThreadIndex(); i < kRoundRows * kOuts; i += kLinearWarps * kWarp) {
      const int64_t out = first_out + i % kOuts;
      const int64_t row = first_row + i / kOuts;
      if (out >= op.weight.out || row >= op.rows) continue;
      float* const y = OutputRow(op, row);
      if (y == nullptr) continue;
      y[out] = Output(op, data, bias, i / kOuts, i % kOuts, row, out);
    }
  }

  // The sum of output `out` of a row, by their indices in the round and in the block.
  static KVANTA_DEVICE float Output(const LinearOp& op, const uint8_t* data, const float* bias, int round_row,
                                    int block_out, int64_t row, int64_t out) {
    float sum = LoadShared<float>(SumAt(0, round_row, block_out));
    KVANTA_UNROLL
    for (int warp = 1; warp < kLinearWarps; ++warp) sum += LoadShared<float>(SumAt(warp, round_row, block_out));
    sum *= op.x.factors[row];
    if constexpr (Panel::kKind == PanelKind::kNvfp4) sum *= RowFactor(op.weight, data, out);
    return bias == nullptr ? sum : sum + bias[out];
  }

  // Two channels of a row per thread.
  static KVANTA_DEVICE void ReduceGated(const LinearOp& op, const uint8_t* data, const float* bias, int64_t first_out,
                                        int64_t first_row) {
    constexpr int kGates = kGatePanels * kPanelRows;
    const int64_t width = op.gated.width;
    for (int i = ThreadIndex(); i < kRoundRows * kGates / 2; i += kLinearWarps * kWarp) {
      const int round_row = i / (kGates / 2), gate = i % (kGates / 2) * 2;
      const int64_t out = first_out + gate, row = first_row + round_row;
      if (out >= width || row >= op.rows) continue;
      float values[2];
      KVANTA_UNROLL
      for (int c = 0; c < 2; ++c) {
        values[c] =
            GatedValue(op.gated.activation, op.gated.limit, Output(op, data, bias, round_row, gate + c, row, out + c),
                       Output(op, data, bias, round_row, kGates + gate + c, row, width + out + c));
      }
      if (op.gated.pack.packs && op.gated.finished_blocks == nullptr) {
        StorePackedPair(op.gated.pack.out, row, width / kPanelChannels, out, values[0], values[1]);
      } else {
        op.gated.out[row * width + out] = values[0];
        op.gated.out[row * width + out + 1] = values[1];
      }
    }
  }
};

// f32 weights, for comparisons: one warp per row of W, up to 8 rows of x at a time.
struct F32Linear {
  static constexpr int kThreads = kLinearWarps * kWarp;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kRows = 8;

  static LaunchShape Shape(const LinearOp& op) { return {CeilDiv(op.weight.out, kLinearWarps), kThreads, 0}; }

  static KVANTA_DEVICE void Run(const LinearOp& op) {
    const int lane = ThreadIndex() % kWarp;
    const int64_t out = int64_t{BlockIndex()} * kLinearWarps + ThreadIndex() / kWarp;
    if (out >= op.weight.out) return;
    const int64_t in = op.weight.in;
    for (int64_t first = 0; first < op.rows; first += kRows) {
      const uint8_t* data = WeightsFor(op, first / RowsOf(op.tile));
      if (data == nullptr) continue;
      const float* bias = BiasFor(op, first / RowsOf(op.tile));
      const float* w = reinterpret_cast<const float*>(data) + out * in;
      float sums[kRows] = {};
      for (int64_t k = lane; k < in; k += kWarp) {
        const float value = w[k];
        KVANTA_UNROLL
        for (int row = 0; row < kRows; ++row) {
          if (first + row < op.rows) sums[row] = MultiplyAdd(op.x_f32[(first + row) * in + k], value, sums[row]);
        }
      }
      KVANTA_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float sum = sums[row];
        for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += ShuffleXor(sum, mask);
        if (lane != 0 || first + row >= op.rows) continue;
        op.y[(first + row) * op.y_stride + out] = bias == nullptr ? sum : sum + bias[out];
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
