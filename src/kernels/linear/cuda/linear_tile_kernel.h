// y = x W^T + b for many rows: tiles of 128 outputs and 128 rows, whose W and x are staged in shared memory. The bits
// are those of LinearBlock (linear_kernel.h): its warps' shares of the units are summed up one after the other here.
// Include the primitives first.
#pragma once

#include "kernels/linear/cuda/linear_kernel.h"

namespace kvanta::kernels::cuda {

template <class Panel>
struct LinearTileBlock {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kBlocksPerSm = 2;  // resident blocks per multiprocessor
  static constexpr int kPanels = PanelsOf(ProductTile::k8x16);
  static constexpr int kRowTiles = RowTilesOf(ProductTile::k8x16);
  static constexpr int kRows = kRowTiles * kRowTile;
  // A warp has a quarter of the tile.
  static constexpr int kWarpPanels = kPanels / 2;
  static constexpr int kWarpTiles = kRowTiles / 2;

  static constexpr int kStages = 3;
  static constexpr int kUnitBytes = UnitBytesOf(Panel::kKind).total;
  static constexpr int kTileBytes = kWarp * 16;       // x of a row tile and unit
  static constexpr int kTileSumBytes = kRowTile * 4;  // unit sums
  static constexpr int kRowsAt = kPanels * kUnitBytes;
  static constexpr int kSumsAt = kRowsAt + kRowTiles * kTileBytes;
  static constexpr int kStageBytes = kSumsAt + (Panel::kHasMinimum ? kRowTiles * kTileSumBytes : 0);
  static constexpr int kTotals = kStages * kStageBytes;  // sums of earlier shares, by lane
  static constexpr int kWarpTotals = kWarpPanels * kWarpTiles * kWarp * 16;
  static constexpr int kSharedBytes = kTotals + kWarps * kWarpTotals;
  static_assert(kUnitBytes % 16 == 0 && kStageBytes % 16 == 0);

  using Sums = float[kWarpPanels][kWarpTiles][4];

  static constexpr LaunchShape Shape(const LinearOp& op) {
    return {CeilDiv(op.weight.out, kPanels * kPanelRows) * CeilDiv(op.rows, kRows), kThreads, kSharedBytes};
  }

  static KVANTA_DEVICE void Run(const LinearOp& op) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    // Adjacent blocks share W, so it is read once into the L2 cache for all rows.
    const auto row_blocks = static_cast<int>(CeilDiv(op.rows, kRows));
    const int64_t first_panel = int64_t{BlockIndex() / row_blocks} * kPanels;
    const int64_t first_tile = int64_t{BlockIndex() % row_blocks} * kRowTiles;
    const auto units = static_cast<int>(op.weight.Units());
    const int share = (units + kLinearWarps - 1) / kLinearWarps;
    const uint8_t* const w = op.weight.data + first_panel * units * kUnitBytes;
    const uint8_t* const x = op.x.codes + first_tile * units * kTileBytes;
    const auto* const row_sums = reinterpret_cast<const uint8_t*>(op.x.unit_sums) + first_tile * units * kTileSumBytes;
    const auto fetch = [&](int unit) {
      if (unit < units) {
        const int stage = unit % kStages * kStageBytes;
        FetchUnit<kPanels, kUnitBytes>(w, units, unit, stage);
        FetchUnit<kRowTiles, kTileBytes>(x, units, unit, stage + kRowsAt);
        if constexpr (Panel::kHasMinimum) FetchUnit<kRowTiles, kTileSumBytes>(row_sums, units, unit, stage + kSumsAt);
      }
      CommitCopies();
    };
    for (int unit = 0; unit < kStages - 1; ++unit) fetch(unit);
    Sums sums = {};
    const int warp_panel = warp % 2 * kWarpPanels;
    const int warp_tile = warp / 2 * kWarpTiles;
    const int totals = kTotals + warp * kWarpTotals + lane * 16;
    int in_share = 0;
    bool has_totals = false;
    for (int unit = 0; unit < units; ++unit) {
      WaitForCopies<kStages - 2>();
      SyncBlock();
      fetch(unit + kStages - 1);
      Multiply(op, first_panel, unit, warp_panel, warp_tile, lane, sums);
      if (++in_share == share && unit + 1 < units) {
        AddTotals(totals, has_totals, sums);
        StoreTotals(totals, sums);
        has_totals = true;
        in_share = 0;
      }
    }
    AddTotals(totals, has_totals, sums);
    StoreRows(op, first_panel + warp_panel, first_tile + warp_tile, CeilDiv(units, share) < kLinearWarps, lane, sums);
  }

 private:
  // Copies one unit of `kCount` panels or row tiles, `kBytes` each.
  template <int kCount, int kBytes>
  static KVANTA_DEVICE void FetchUnit(const uint8_t* from, int units, int unit, int to) {
    constexpr int kPieces = kBytes / 16;
    KVANTA_UNROLL
    for (int first = 0; first < kCount * kPieces; first += kThreads) {
      const int piece = first + ThreadIndex();
      if (kCount * kPieces % kThreads != 0 && piece >= kCount * kPieces) break;
      const int64_t source = (int64_t{piece / kPieces} * units + unit) * kBytes + piece % kPieces * 16;
      CopyToShared16(to + piece * 16, from + source);
    }
  }

  // block_panel: the block's first panel; first_panel, first_tile: the warp's in the block.
  static KVANTA_DEVICE void Multiply(const LinearOp& op, int64_t block_panel, int unit, int first_panel, int first_tile,
                                     int lane, Sums& sums) {
    const int stage = unit % kStages * kStageBytes;
    typename Panel::Raw w[kWarpPanels];
    KVANTA_UNROLL
    for (int panel = 0; panel < kWarpPanels; ++panel) {
      const UnitAt at{op.weight, op.weight.data, block_panel + first_panel + panel, unit};
      w[panel] = Panel::FromShared(stage + (first_panel + panel) * kUnitBytes, at, lane);
    }
    if constexpr (!Panel::kScaled) {
      KVANTA_UNROLL
      for (int step = 0; step < 2; ++step) {
        KVANTA_UNROLL
        for (int tile = 0; tile < kWarpTiles; ++tile) {
          const auto x = LoadShared<Vec2>(RowsAt(stage, first_tile + tile, lane) + 8 * step);
          KVANTA_UNROLL
          for (int panel = 0; panel < kWarpPanels; ++panel) {
            Panel::Multiply(sums[panel][tile], Panel::Operand(w[panel], step), x.word[0], x.word[1]);
          }
        }
      }
    } else {
      Vec4 a[kWarpPanels][2];
      KVANTA_UNROLL
      for (int panel = 0; panel < kWarpPanels; ++panel) {
        a[panel][0] = Panel::Operand(w[panel], 0);
        a[panel][1] = Panel::Operand(w[panel], 1);
      }
      KVANTA_UNROLL
      for (int tile = 0; tile < kWarpTiles; ++tile) {
        const auto x = LoadShared<Vec4>(RowsAt(stage, first_tile + tile, lane));
        Vec2 row_sums = {};
        if constexpr (Panel::kHasMinimum) {
          row_sums = LoadShared<Vec2>(stage + kSumsAt + (first_tile + tile) * kTileSumBytes + lane % 4 * 8);
        }
        KVANTA_UNROLL
        for (int panel = 0; panel < kWarpPanels; ++panel) {
          AddProducts<Panel>(w[panel], a[panel], x, row_sums, sums[panel][tile]);
        }
      }
    }
  }
  static KVANTA_DEVICE int RowsAt(int stage, int tile, int lane) {
    return stage + kRowsAt + tile * kTileBytes + lane * 16;
  }

  static KVANTA_DEVICE void AddTotals(int totals, bool has_totals, Sums& sums) {
    if (!has_totals) return;
    KVANTA_UNROLL
    for (int i = 0; i < kWarpPanels * kWarpTiles; ++i) {
      const auto total = LoadShared<Vec4>(totals + i * (kWarp * 16));
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[i / kWarpTiles][i % kWarpTiles][e];
        sum = std::bit_cast<float>(total.word[e]) + sum;
      }
    }
  }
  // Stores the sums and clears them.
  static KVANTA_DEVICE void StoreTotals(int totals, Sums& sums) {
    KVANTA_UNROLL
    for (int i = 0; i < kWarpPanels * kWarpTiles; ++i) {
      Vec4 total;
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[i / kWarpTiles][i % kWarpTiles][e];
        total.word[e] = std::bit_cast<uint32_t>(sum);
        sum = 0;
      }
      StoreShared(totals + i * (kWarp * 16), total);
    }
  }

  // `empty_shares`: some of LinearBlock's warps have no units, whose zeros it adds (to a sum of -0).
  static KVANTA_DEVICE void StoreRows(const LinearOp& op, int64_t first_panel, int64_t first_tile, bool empty_shares,
                                      int lane, const Sums& sums) {
    KVANTA_UNROLL
    for (int tile = 0; tile < kWarpTiles; ++tile) {
      KVANTA_UNROLL
      for (int q = 0; q < 2; ++q) {
        const int64_t row = (first_tile + tile) * kRowTile + lane % 4 * 2 + q;
        if (row >= op.rows) continue;
        const float factor = op.x.factors[row];
        float* const y = op.y + row * op.y_stride;
        KVANTA_UNROLL
        for (int i = 0; i < 2 * kWarpPanels; ++i) {
          const int64_t out = (first_panel + i / 2) * kPanelRows + lane / 4 + i % 2 * 8;
          if (out >= op.weight.out) continue;
          float sum = sums[i / 2][tile][i % 2 * 2 + q];
          if (empty_shares) sum += 0.0F;
          sum *= factor;
          if constexpr (Panel::kKind == PanelKind::kNvfp4) sum *= RowFactor(op.weight, op.weight.data, out);
          y[out] = op.weight.bias == nullptr ? sum : sum + op.weight.bias[out];
        }
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
