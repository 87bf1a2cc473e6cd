// Matrix product, written once over the Vec16 of the including ISA unit for every storage of W. A register tile is
// kRows rows x kPanels panels of 16 columns. Decode (one tile of rows) runs through all of k with the sums in registers
// and several panels in flight; with more tiles, a block of steps of the panels stays in the cache while the row tiles
// pass over it.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/table.h"

namespace kvanta::kernels {
namespace {

template <class W>
constexpr int64_t kXStride = W::kBlockSteps* W::kPhases* static_cast<int64_t>(sizeof(typename W::X)) + 64;

// One register tile over blocks [first_block, end_block) of steps.
struct TileTask {
  const uint8_t* x = nullptr;  // first row of the tile, block 0
  int64_t x_block = 0;         // bytes from block to block
  const uint8_t* w = nullptr;  // first panel, step 0
  int64_t w_panel = 0;         // bytes from panel to panel
  StepBlocks steps;
  int64_t first_block = 0;
  int64_t end_block = 0;
  const float* bias = nullptr;  // of the tile's first column, or null
  float* y = nullptr;           // the tile's first element
  int64_t y_stride = 0;
  int64_t columns = 0;  // valid, of 16 * panels
};

template <int kRows, int kPanels>
struct Sums {
  Vec16::F v[kRows][kPanels];
};

// Calls visit(panel, valid columns) for each panel.
template <int kPanels, class Visit>
KVANTA_INLINE void ForPanels(int64_t columns, Visit visit) {
#pragma GCC unroll 8
  for (int panel = 0; panel < kPanels; ++panel) {
    const int64_t left = columns - int64_t{panel} * kPanelColumns;
    visit(panel, left < kPanelColumns ? static_cast<int>(left) : kPanelColumns);
  }
}

// Keeps the smaller of the two operands in registers and streams the other.
template <class W, int kRows, int kPanels, int kPhase>
KVANTA_INLINE void AddPhase(const uint8_t* x, const uint8_t* w, int64_t w_panel, Sums<kRows, kPanels>& sums) {
  const auto load_x = [&](int row) __attribute__((always_inline)) {
    return W::SetX(reinterpret_cast<const typename W::X*>(x + row * kXStride<W>) + kPhase);
  };
  const auto load_w = [&](int panel) __attribute__((always_inline)) {
    return W::template LoadW<kPhase>(w + panel * w_panel);
  };
  if constexpr (kRows < kPanels) {
    decltype(load_x(0)) values[kRows];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) values[row] = load_x(row);
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
      const auto weight = load_w(panel);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) sums.v[row][panel] = W::Dot(values[row], weight, sums.v[row][panel]);
    }
  } else {
    decltype(load_w(0)) weights[kPanels];
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) weights[panel] = load_w(panel);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const auto value = load_x(row);
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel) {
        sums.v[row][panel] = W::Dot(value, weights[panel], sums.v[row][panel]);
      }
    }
  }
}

template <class W, int kRows, int kPanels>
void MultiplyTile(const TileTask& t) noexcept {
  constexpr int64_t kXStepBytes = W::kPhases * static_cast<int64_t>(sizeof(typename W::X));
  Sums<kRows, kPanels> sums;
  if (t.first_block == 0) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel) sums.v[row][panel] = Vec16::Zero();
    }
  } else {
    ForPanels<kPanels>(
        t.columns, [&](int panel, int n) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int row = 0; row < kRows; ++row) {
            const float* y = t.y + row * t.y_stride + panel * kPanelColumns;
            sums.v[row][panel] = n == Vec16::kLanes ? Vec16::Load(y) : Vec16::LoadTail(y, n);
          }
        });
  }

  for (int64_t block = t.first_block; block < t.end_block; ++block) {
    const int64_t first = t.steps.First(block);
    const uint8_t* x = t.x + block * t.x_block;
    const uint8_t* const x_end = x + (t.steps.First(block + 1) - first) * kXStepBytes;
    const uint8_t* w = t.w + first * W::kPanelStepBytes;
    for (; x != x_end; x += kXStepBytes, w += W::kPanelStepBytes) {
      if constexpr (W::kPrefetchBytes != 0) {
#pragma GCC unroll 8
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma GCC unroll 16
          for (int line = 0; line < W::kPanelStepBytes; line += 64) {
            __builtin_prefetch(w + panel * t.w_panel + W::kPrefetchBytes + line);
          }
        }
      }
      if constexpr (W::kIsBlock) {
        W::template AddStep<kRows>(x, kXStride<W>, w, sums.v);
      } else {
        AddPhase<W, kRows, kPanels, 0>(x, w, t.w_panel, sums);
        if constexpr (W::kPhases == 2) AddPhase<W, kRows, kPanels, 1>(x, w, t.w_panel, sums);
      }
    }
  }

  ForPanels<kPanels>(
      t.columns, [&](int panel, int n) __attribute__((always_inline)) {
        Vec16::F bias = Vec16::Zero();
        if (t.bias != nullptr) bias = Vec16::LoadTail(t.bias + panel * kPanelColumns, n);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          float* y = t.y + row * t.y_stride + panel * kPanelColumns;
          const Vec16::F sum = t.bias != nullptr ? Vec16::Add(sums.v[row][panel], bias) : sums.v[row][panel];
          if (n == Vec16::kLanes) {
            Vec16::Store(y, sum);
          } else {
            Vec16::StoreTail(y, sum, n);
          }
        }
      });
}

// Maximum panels of a tile with `rows` rows.
template <class W>
constexpr int PanelsOf(int rows) {
  const int fit = W::kTileSums / rows;
  return fit < 1 ? 1 : (fit < W::kColumnTile ? fit : W::kColumnTile);
}

using TileFunction = void (*)(const TileTask&) noexcept;

// Finds the instance for rows x panels by counting down.
template <class W, int kRows, int kPanels>
TileFunction FindPanels(int panels) {
  if constexpr (kPanels > 1) {
    if (panels < kPanels) return FindPanels<W, kRows, kPanels - 1>(panels);
  }
  return MultiplyTile<W, kRows, kPanels>;
}

template <class W, int kRows = W::kRowTile>
TileFunction FindTile(int rows, int panels) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return FindTile<W, kRows - 1>(rows, panels);
  }
  return FindPanels<W, kRows, PanelsOf<W>(kRows)>(panels);
}

// Panels, a block of steps of each, that fit in a part of the second-level cache. In blocks of few bits they are
// smaller than the rows of a tile: those stay in the first-level cache while the panels pass.
template <class W>
constexpr int64_t kCachedPanels = (192 << 10) / (W::kBlockSteps * W::kPanelStepBytes);

template <class W>
void Multiply(const MultiplyTask& task) noexcept {
  const int64_t rows = task.rows;
  const int64_t tiles = CeilDiv(rows, W::kRowTile);
  const int max_rows = static_cast<int>(CeilDiv(rows, tiles));
  const int64_t panels = task.end_panel - task.first_panel;
  const int64_t groups = CeilDiv(panels, PanelsOf<W>(max_rows));

  TileTask t;
  t.x_block = rows * kXStride<W>;
  t.w_panel = task.steps.steps * W::kPanelStepBytes;
  t.steps = task.steps;
  t.y_stride = task.y_stride;
  const int64_t blocks_at_once = tiles == 1 ? task.steps.blocks : 1;
  const int64_t groups_at_once = W::kIsBlock ? kCachedPanels<W> : 1;
  for (t.first_block = 0; t.first_block < task.steps.blocks; t.first_block = t.end_block) {
    t.end_block = t.first_block + blocks_at_once;
    const bool last = t.end_block == task.steps.blocks;
    for (int64_t group = 0; group < groups; group += groups_at_once) {
      const int64_t end_group = group + groups_at_once < groups ? group + groups_at_once : groups;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = tile * rows / tiles;
        const int64_t end_row = (tile + 1) * rows / tiles;
        t.x = task.x + row * kXStride<W>;
        for (int64_t g = group; g < end_group; ++g) {
          const int64_t panel = task.first_panel + g * panels / groups;
          const int64_t end_panel = task.first_panel + (g + 1) * panels / groups;
          const int64_t column = panel * kPanelColumns;
          const int64_t end_column = end_panel * kPanelColumns;
          t.w = task.w + panel * t.w_panel;
          t.bias = last && task.bias != nullptr ? task.bias + column : nullptr;
          t.columns = (end_column < task.out ? end_column : task.out) - column;
          t.y = task.y + row * task.y_stride + column;
          FindTile<W>(static_cast<int>(end_row - row), static_cast<int>(end_panel - panel))(t);
        }
      }
    }
  }
}

template <class W>
void Pack(const PackTask& task) noexcept {
  for (int64_t block = 0; block < task.steps.blocks; ++block) {
    const int64_t begin = task.steps.First(block) * W::kStepK;
    const int64_t end = task.steps.First(block + 1) * W::kStepK;
    const int64_t k = (end < task.k ? end : task.k) - begin;
    for (int64_t row = task.first_row; row < task.end_row; ++row) {
      auto* out = reinterpret_cast<typename W::X*>(task.out + (block * task.rows + row) * kXStride<W>);
      const float* x = task.x + row * task.k;
      if constexpr (requires { &W::PackOrderedRow; }) {
        if (task.order != nullptr) {
          W::PackOrderedRow(x, task.order + begin, k, out);
          continue;
        }
      }
      W::PackRow(x + begin, k, out);
    }
  }
}

// Rows whose packed x (a block of steps) fits in half of a 512 KiB L2; a multiple of every unit's row tile.
inline constexpr int64_t kBlockRows = 120;

template <class W>
constexpr WeightKernels kWeightKernels{.step_k = W::kStepK,
                                       .block_steps = W::kBlockSteps,
                                       .block_rows = kBlockRows,
                                       .x_stride = kXStride<W>,
                                       .panel_step_bytes = W::kPanelStepBytes,
                                       .pack = Pack<W>,
                                       .multiply = Multiply<W>};

}  // namespace
}  // namespace kvanta::kernels
