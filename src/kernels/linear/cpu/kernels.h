// Matrix product, written once over the Vec16 of the including ISA unit for every storage of W. A register tile is
// kRows rows x kPanels panels of 16 columns. Few rows are one tile, which runs through all of k with the sums in
// registers while weights stream from memory. Of more rows, a block of steps of x stays in the second-level cache and
// one of a group of panels in the first-level cache while the row tiles pass over it; sums continue in y, and each tile
// prefetches what the next one reads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/math.h"
#include "kernels/linear/cpu/register_tile.h"
#include "kernels/linear/cpu/table.h"

namespace kvanta::kernels {
namespace {

// Panels, a block of steps of each, that fit in a part of the second-level cache. In blocks of few bits they are
// smaller than the rows of a tile: those stay in the first-level cache while the panels pass.
template <class W>
constexpr int64_t kCachedGroups = (192 << 10) / (W::kBlockSteps * W::kPanelStepBytes * W::kColumnTile);

// A task's rows in tiles, as even as possible, and its panels in groups.
struct TileGrid {
  int64_t tiles = 0;
  int64_t groups = 0;
};

template <class W>
TileGrid GridOf(const MultiplyTask& task) {
  const int64_t tiles = task.rows <= kSingleTileRows<W> ? 1 : CeilDiv(task.rows, W::kRowTile);
  const auto max_rows = TileRows(static_cast<int>(CeilDiv(task.rows, tiles)));
  return {tiles, CeilDiv(task.end_panel - task.first_panel, PanelsOf<W>(max_rows, tiles > 1))};
}

// Adjacent panels of a task.
struct PanelGroup {
  int64_t panel = 0;
  int panels = 0;

  PanelGroup(const MultiplyTask& task, const TileGrid& grid, int64_t group) {
    const int64_t all = task.end_panel - task.first_panel;
    panel = task.first_panel + group * all / grid.groups;
    panels = static_cast<int>(task.first_panel + (group + 1) * all / grid.groups - panel);
  }
  int64_t Column() const { return panel * kPanelColumns; }
};

inline TileTask FirstTile(const MultiplyTask& task, int64_t x_stride, int64_t panel_step_bytes, int64_t end_block) {
  return {.x = task.x,
          .x_block = task.rows * x_stride,
          .w_panel = task.steps.steps * panel_step_bytes,
          .steps = task.steps,
          .end_block = end_block,
          .y_stride = task.y_stride};
}

// Sets a tile's panels; its rows begin with `row`.
inline void SetPanels(const MultiplyTask& task, int64_t row, const PanelGroup& group, int64_t panel_step_bytes,
                      TileTask& t) {
  const int64_t column = group.Column(), columns = int64_t{group.panels} * kPanelColumns;
  t.w = task.w + group.panel * t.w_panel + task.steps.First(t.first_block) * panel_step_bytes;
  t.bias = t.end_block == task.steps.blocks && task.bias != nullptr ? task.bias + column : nullptr;
  t.columns = columns < task.out - column ? columns : task.out - column;
  t.y = task.y + row * task.y_stride + column;
}

template <class W>
void MultiplySingleTile(const MultiplyTask& task, const TileGrid& grid) noexcept {
  TileTask t = FirstTile(task, kXStride<W>, W::kPanelStepBytes, task.steps.blocks);
  t.rows = task.rows;
  for (int64_t g = 0; g < grid.groups; ++g) {
    const PanelGroup group(task, grid, g);
    SetPanels(task, 0, group, W::kPanelStepBytes, t);
    FindSingleTile<W>(static_cast<int>(task.rows), group.panels)(t);
  }
}

// Tiles of a block of steps stay in the first-level cache while panels pass.
template <class W>
void MultiplyBlocks(const MultiplyTask& task, const TileGrid& grid) noexcept {
  TileTask t = FirstTile(task, kXStride<W>, W::kPanelStepBytes, 0);
  for (; t.first_block < task.steps.blocks; t.first_block = t.end_block) {
    t.end_block = t.first_block + 1;
    for (int64_t first = 0; first < grid.groups; first += kCachedGroups<W>) {
      const int64_t end = first + kCachedGroups<W> < grid.groups ? first + kCachedGroups<W> : grid.groups;
      for (int64_t tile = 0; tile < grid.tiles; ++tile) {
        const int64_t row = FirstRow<W>(tile, grid.tiles, task.rows);
        t.rows = FirstRow<W>(tile + 1, grid.tiles, task.rows) - row;
        t.x = task.x + row * kXStride<W>;
        for (int64_t g = first; g < end; ++g) {
          const PanelGroup group(task, grid, g);
          SetPanels(task, row, group, W::kPanelStepBytes, t);
          FindTileOfMany<W>(static_cast<int>(t.rows), group.panels)(t);
        }
      }
    }
  }
}

// Storage of W that tiles of very many rows read: an expanded copy, or W.
template <class W>
struct Expansion {
  using Type = W;
};
template <class W>
requires requires {
  typename W::Expanded;
}
struct Expansion<W> {
  using Type = typename W::Expanded;
};
template <class W>
using ExpandedOr = typename Expansion<W>::Type;

// With fewer rows, the copy costs more than tiles save.
inline constexpr int64_t kMinExpandedRows = 48;

// An expanded copy of a group of panels, a block of steps, stays in the first-level cache while tiles pass.
template <class W>
void MultiplyExpanded(const MultiplyTask& task, const TileGrid& grid) noexcept {
  using Expanded = ExpandedOr<W>;
  constexpr int64_t kPanelBytes = W::kBlockSteps * Expanded::kPanelStepBytes;
  alignas(64) uint8_t expanded[Expanded::kColumnTile * kPanelBytes];
  TileTask t = FirstTile(task, kXStride<W>, W::kPanelStepBytes, 0);
  for (; t.first_block < task.steps.blocks; t.first_block = t.end_block) {
    t.end_block = t.first_block + 1;
    const int64_t steps = task.steps.First(t.end_block) - task.steps.First(t.first_block);
    for (int64_t g = 0; g < grid.groups; ++g) {
      const PanelGroup group(task, grid, g);
      t.w_panel = task.steps.steps * W::kPanelStepBytes;
      SetPanels(task, 0, group, W::kPanelStepBytes, t);
      for (int panel = 0; panel < group.panels; ++panel) {
        for (int64_t step = 0; step < steps; ++step) {
          W::ExpandStep(t.w + panel * t.w_panel + step * W::kPanelStepBytes,
                        expanded + panel * kPanelBytes + step * Expanded::kPanelStepBytes);
        }
      }
      t.w = expanded;
      t.w_panel = kPanelBytes;
      for (int64_t tile = 0; tile < grid.tiles; ++tile) {
        const int64_t row = FirstRow<Expanded>(tile, grid.tiles, task.rows);
        t.rows = FirstRow<Expanded>(tile + 1, grid.tiles, task.rows) - row;
        t.x = task.x + row * kXStride<W>;
        FindTileOfMany<Expanded>(static_cast<int>(t.rows), group.panels)(t);
        t.y += t.rows * t.y_stride;
      }
    }
  }
}

// A group of panels of a block of steps stays in the first-level cache while tiles pass. A tile prefetches the next
// tile's rows and sums; each of the first tiles also a panel of the next group.
template <class W>
void MultiplyElements(const MultiplyTask& task, const TileGrid& grid) noexcept {
  TileTask t = FirstTile(task, kXStride<W>, W::kPanelStepBytes, 0);
  for (; t.first_block < task.steps.blocks; t.first_block = t.end_block) {
    t.end_block = t.first_block + 1;
    const uint8_t* const block_x = task.x + t.first_block * t.x_block;
    const int64_t first_step = task.steps.First(t.first_block), end_step = task.steps.First(t.end_block);
    for (int64_t g = 0; g < grid.groups; ++g) {
      const bool last = g + 1 == grid.groups;
      const PanelGroup group(task, grid, g), next(task, grid, last ? 0 : g + 1);
      SetPanels(task, 0, group, W::kPanelStepBytes, t);
      const float* const next_y = task.y + next.Column();
      const uint8_t* const next_w =
          task.w + next.panel * t.w_panel + (last ? end_step : first_step) * W::kPanelStepBytes;
      for (int64_t tile = 0, row = 0, end_row = 0; tile < grid.tiles; ++tile, row = end_row) {
        end_row = FirstRow<W>(tile + 1, grid.tiles, task.rows);
        t.rows = end_row - row;
        const bool last_tile = end_row == task.rows;
        t.x = task.x + row * kXStride<W>;
        t.next_x = last_tile ? block_x : block_x + end_row * kXStride<W>;
        t.next_y = last_tile ? next_y : t.y + t.rows * t.y_stride;
        t.next_w = tile < next.panels ? next_w + tile * t.w_panel : t.w;
        FindTileOfMany<W>(static_cast<int>(t.rows), group.panels)(t);
        t.y += t.rows * t.y_stride;
      }
    }
  }
}

template <class W>
void Multiply(const MultiplyTask& task) noexcept {
  if constexpr (!std::is_same_v<ExpandedOr<W>, W>) {
    if (task.rows >= kMinExpandedRows) return MultiplyExpanded<W>(task, GridOf<ExpandedOr<W>>(task));
  }
  const TileGrid grid = GridOf<W>(task);
  if (grid.tiles == 1) return MultiplySingleTile<W>(task, grid);
  if constexpr (W::kIsBlock) {
    MultiplyBlocks<W>(task, grid);
  } else {
    MultiplyElements<W>(task, grid);
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

// Rows whose packed x (a block of steps) takes about half of a 512 KiB L2, in whole tiles; 264 for vdpbf16ps and f32. A
// tile may read the row after an odd number of rows: there is memory for it.
template <class W>
constexpr int64_t kBlockRows = W::kIsBlock ? 192
                                           : (288 << 10) / (kXStride<W> * W::kRowTile) * int64_t{W::kRowTile} / 2 * 2;

template <class W>
constexpr WeightKernels kWeightKernels{.step_k = W::kStepK,
                                       .block_steps = W::kBlockSteps,
                                       .block_rows = kBlockRows<W>,
                                       .tile_panels = PanelsOf<ExpandedOr<W>>(ExpandedOr<W>::kRowTile, true),
                                       .x_stride = kXStride<W>,
                                       .panel_step_bytes = W::kPanelStepBytes,
                                       .pack = Pack<W>,
                                       .multiply = Multiply<W>};

}  // namespace
}  // namespace kvanta::kernels
