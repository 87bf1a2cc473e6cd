// y = x W^T + b on tensor cores. W lies on M (16 rows of a panel), rows of x on N (tiles of 8): a decode of up to 8
// rows fills its products. A unit that includes this has included the primitives.
//
// The 8 warps of a block take an eighth of the units each, of the same panels and rows, and add up in order at the end.
// That order, and the order of units within an eighth, depend on `in` alone, so a row's bits do not depend on the
// number of rows nor on the tile. Weights are read straight into registers, every byte once, as whole lines.
#pragma once

#include "kernels/linear/cuda/weight_panels.h"

namespace kvanta::kernels::cuda {

inline constexpr int kLinearWarps = 8;

// W for tile `tile` of rows; none where nobody wants them.
KVANTA_DEVICE const uint8_t* WeightsFor(const LinearWork& work, int64_t tile) {
  if (work.group == nullptr) return work.weight.data;
  if (work.tile_members == nullptr) return work.group[tile * RowsOf(work.tile) / work.members.rows];
  const int32_t member = work.tile_members[tile];
  return member < 0 ? nullptr : work.group[member];
}

// Where a row of y begins; none where nobody wants it.
KVANTA_DEVICE float* OutputRow(const LinearWork& work, int64_t row) {
  if (work.members.rows == 0) return work.y + row * work.y_stride;
  const int64_t in_member = row % work.members.rows;
  if (in_member >= work.members.used) return nullptr;
  return work.y + row / work.members.rows * work.y_member + in_member * work.y_stride;
}

template <class Panel, ProductTile kTile>
struct LinearBlock {
  static constexpr int kPanels = PanelsOf(kTile);
  static constexpr int kRowTiles = RowTilesOf(kTile);
  static constexpr int kOuts = kPanels * kPanelOuts;
  static constexpr int kRows = kRowTiles * kRowTile;
  static constexpr int kRounds = kRows > 32 ? 2 : 1;  // of the sums, for less shared memory
  static constexpr int kRoundTiles = kRowTiles / kRounds;
  static constexpr int kRoundRows = kRows / kRounds;
  static constexpr int kStride = kOuts + 4;  // floats of a row of sums; the pad keeps the lanes' banks apart
  static constexpr int kWarpBytes = 4 * kRoundRows * kStride;
  static constexpr int kSharedBytes = kLinearWarps * kWarpBytes;
  // Units in flight: for a decode about 2 KiB of a warp; a large tile has no registers for more.
  static constexpr int kAhead = kPanels > 2 ? 1 : kPanels > 1 ? 2 : Panel::kKind == PanelKind::kInt4 ? 8 : 4;
  static constexpr bool kRowsAhead = kRowTiles == 1;

  struct Loaded {
    typename Panel::Raw w[kPanels];
    Vec4 x[1];  // where kRowsAhead
  };
  using Sums = float[kPanels][kRowTiles][4];

  static constexpr LaunchShape Shape(const LinearWork& work) {
    const int64_t columns = (work.weight.out + kOuts - 1) / kOuts;
    return {columns * ((work.rows + kRows - 1) / kRows), kLinearWarps * kWarp, kSharedBytes};
  }

  static KVANTA_DEVICE void Run(const LinearWork& work) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    // Blocks side by side share W, which the second-level cache then reads once for all rows.
    const auto row_blocks = static_cast<int>((work.rows + kRows - 1) / kRows);
    const int64_t first_panel = int64_t{BlockIndex() / row_blocks} * kPanels;
    const int64_t first_tile = int64_t{BlockIndex() % row_blocks} * kRowTiles;
    const uint8_t* data = WeightsFor(work, BlockIndex() % row_blocks);
    if (data == nullptr) return;
    const int64_t units = work.weight.Units();
    const int64_t share = (units + kLinearWarps - 1) / kLinearWarps;
    const int64_t begin = warp * share;
    const int64_t end = begin + share < units ? begin + share : units;

    Sums sums = {};
    Loaded ahead[kAhead];
    const auto load = [&](Loaded& to, int64_t unit) {
      Load(work, data, first_panel, first_tile, units, unit, lane, to);
    };
    KVANTA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i < end) load(ahead[i], begin + i);
    }
    for (int64_t unit = begin; unit < end; unit += kAhead) {
      KVANTA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (unit + i >= end) break;
        Multiply(work, first_tile, units, unit + i, lane, ahead[i], sums);
        if (unit + i + kAhead < end) load(ahead[i], unit + i + kAhead);
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      if (round > 0) SyncBlock();
      Deposit(sums, round, warp, lane);
      SyncBlock();
      AddUp(work, first_panel * kPanelOuts, first_tile * kRowTile + round * kRoundRows);
    }
  }

 private:
  static KVANTA_DEVICE const uint8_t* RowsAt(const LinearWork& work, int64_t tile, int64_t units, int64_t unit,
                                             int lane) {
    return work.x.codes + ((tile * units + unit) * kWarp + lane) * 16;
  }

  static KVANTA_DEVICE void Load(const LinearWork& work, const uint8_t* data, int64_t first_panel, int64_t first_tile,
                                 int64_t units, int64_t unit, int lane, Loaded& to) {
    constexpr int kUnitBytes = BytesOf(Panel::kKind).all;
    KVANTA_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      to.w[panel] = Panel::Load(data + ((first_panel + panel) * units + unit) * kUnitBytes, lane);
    }
    if constexpr (kRowsAhead) to.x[0] = LoadVec4(RowsAt(work, first_tile, units, unit, lane));
  }

  // One unit: two steps of 16 channels.
  static KVANTA_DEVICE void Multiply(const LinearWork& work, int64_t first_tile, int64_t units, int64_t unit, int lane,
                                     const Loaded& loaded, Sums& sums) {
    Vec4 a[kPanels][2];
    KVANTA_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      a[panel][0] = Panel::Operand(loaded.w[panel], 0);
      a[panel][1] = Panel::Operand(loaded.w[panel], 1);
    }
    KVANTA_UNROLL
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const Vec4 x = kRowsAhead ? loaded.x[0] : LoadVec4(RowsAt(work, first_tile + tile, units, unit, lane));
      Vec2 row_sums = {};
      if constexpr (Panel::kMinimum) {
        row_sums = LoadVec2(reinterpret_cast<const uint8_t*>(
            work.x.unit_sums + ((first_tile + tile) * units + unit) * kRowTile + lane % 4 * 2));
      }
      KVANTA_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        if constexpr (!Panel::kScaled) {
          Panel::Multiply(sums[panel][tile], a[panel][0], x.word[0], x.word[1]);
          Panel::Multiply(sums[panel][tile], a[panel][1], x.word[2], x.word[3]);
        } else {
          float part[4] = {};
          Panel::Multiply(part, a[panel][0], x.word[0], x.word[1]);
          Panel::Multiply(part, a[panel][1], x.word[2], x.word[3]);
          AddScaled(loaded.w[panel], row_sums, part, sums[panel][tile]);
        }
      }
    }
  }

  // Of rows g (0, 1) and g + 8 (2, 3) of the panel, and two rows of x.
  static KVANTA_DEVICE void AddScaled(const typename Panel::Raw& raw, const Vec2& row_sums, const float (&part)[4],
                                      float (&sums)[4]) {
    const uint32_t scales = Panel::Scales(raw);
    const float scale[2] = {LowF16(scales), HighF16(scales)};
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = MultiplyAdd(scale[i / 2], part[i], sums[i]);
    if constexpr (Panel::kMinimum) {
      const uint32_t minimums = Panel::Minimums(raw);
      const float minimum[2] = {LowF16(minimums), HighF16(minimums)};
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[i] = MultiplyAdd(minimum[i / 2], std::bit_cast<float>(row_sums.word[i % 2]), sums[i]);
      }
    }
  }

  static KVANTA_DEVICE int SumAt(int warp, int row, int out) { return warp * kWarpBytes + 4 * (row * kStride + out); }

  static KVANTA_DEVICE void Deposit(const Sums& sums, int round, int warp, int lane) {
    KVANTA_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      KVANTA_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        if (tile / kRoundTiles != round) continue;  // the index stays one that is known when this is compiled
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          StoreShared(SumAt(warp, tile % kRoundTiles * kRowTile + lane % 4 * 2 + i % 2,
                            panel * kPanelOuts + lane / 4 + i / 2 * 8),
                      sums[panel][tile][i]);
        }
      }
    }
  }

  static KVANTA_DEVICE void AddUp(const LinearWork& work, int64_t first_out, int64_t first_row) {
    for (int i = ThreadIndex(); i < kRoundRows * kOuts; i += kLinearWarps * kWarp) {
      const int64_t out = first_out + i % kOuts;
      const int64_t row = first_row + i / kOuts;
      if (out >= work.weight.out || row >= work.rows) continue;
      float* const y = OutputRow(work, row);
      if (y == nullptr) continue;
      float sum = LoadShared<float>(SumAt(0, i / kOuts, i % kOuts));
      KVANTA_UNROLL
      for (int warp = 1; warp < kLinearWarps; ++warp) sum += LoadShared<float>(SumAt(warp, i / kOuts, i % kOuts));
      sum *= work.x.factors[row];
      y[out] = work.weight.bias == nullptr ? sum : sum + work.weight.bias[out];
    }
  }
};

// W in f32, for comparisons with other programs: a warp for each row of W, up to 8 rows of x at a time.
struct PlainLinear {
  static constexpr int kRows = 8;

  static LaunchShape Shape(const LinearWork& work) {
    return {(work.weight.out + kLinearWarps - 1) / kLinearWarps, kLinearWarps * kWarp, 0};
  }

  static KVANTA_DEVICE void Run(const LinearWork& work) {
    const int lane = ThreadIndex() % kWarp;
    const int64_t out = int64_t{BlockIndex()} * kLinearWarps + ThreadIndex() / kWarp;
    if (out >= work.weight.out) return;
    const int64_t in = work.weight.in;
    for (int64_t first = 0; first < work.rows; first += kRows) {
      const uint8_t* data = WeightsFor(work, first / RowsOf(work.tile));
      if (data == nullptr) continue;
      const float* w = reinterpret_cast<const float*>(data) + out * in;
      float sums[kRows] = {};
      for (int64_t k = lane; k < in; k += kWarp) {
        const float value = w[k];
        KVANTA_UNROLL
        for (int row = 0; row < kRows; ++row) {
          if (first + row < work.rows) sums[row] = MultiplyAdd(work.plain[(first + row) * in + k], value, sums[row]);
        }
      }
      KVANTA_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float sum = sums[row];
        for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += ShuffleXor(sum, mask);
        if (lane != 0 || first + row >= work.rows) continue;
        work.y[(first + row) * work.y_stride + out] = work.weight.bias == nullptr ? sum : sum + work.weight.bias[out];
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
