// Matrix product, written once over the Vec16 of the including ISA unit for every storage of W. A register tile is
// kRows rows x kPanels panels of 16 columns. Few rows are one tile, which runs through all of k with the sums in
// registers while weights stream from memory. Of more rows, a block of steps of x stays in the second-level cache and
// one of a group of panels in the first-level cache while the row tiles pass over it; sums continue in y, and each tile
// prefetches what the next one reads.
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
  // Operands of tiles to come, which a tile of many prefetches: of x and W a line per step.
  const uint8_t* next_x = nullptr;
  const uint8_t* next_w = nullptr;
  const float* next_y = nullptr;
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
#pragma GCC unroll 24
    for (int row = 0; row < kRows; ++row) values[row] = load_x(row);
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
      const auto weight = load_w(panel);
#pragma GCC unroll 24
      for (int row = 0; row < kRows; ++row) sums.v[row][panel] = W::Dot(values[row], weight, sums.v[row][panel]);
    }
  } else {
    decltype(load_w(0)) weights[kPanels];
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) weights[panel] = load_w(panel);
#pragma GCC unroll 24
    for (int row = 0; row < kRows; ++row) {
      const auto value = load_x(row);
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel) {
        sums.v[row][panel] = W::Dot(value, weights[panel], sums.v[row][panel]);
      }
    }
  }
}

template <int kRows, int kPanels>
KVANTA_INLINE void StoreSums(const TileTask& t, const Sums<kRows, kPanels>& sums) {
  float* const y = t.y;
  const int64_t y_stride = t.y_stride;
  if (t.bias == nullptr && t.columns == kPanels * kPanelColumns) {
#pragma GCC unroll 24
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel) {
        Vec16::Store(y + row * y_stride + panel * kPanelColumns, sums.v[row][panel]);
      }
    }
    return;
  }
  ForPanels<kPanels>(
      t.columns, [&](int panel, int n) __attribute__((always_inline)) {
        const float* const bias = t.bias;
        const Vec16::F added = bias != nullptr ? Vec16::LoadTail(bias + panel * kPanelColumns, n) : Vec16::Zero();
#pragma GCC unroll 24
        for (int row = 0; row < kRows; ++row) {
          const Vec16::F sum = sums.v[row][panel];
          Vec16::StoreTail(y + row * y_stride + panel * kPanelColumns, bias != nullptr ? Vec16::Add(sum, added) : sum,
                           n);
        }
      });
}

// Prefetches a step of the panels of a single tile of rows, which streams them from memory.
template <class W, int kPanels>
KVANTA_INLINE void PrefetchWeights(const uint8_t* w, int64_t w_panel) {
#pragma GCC unroll 8
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma GCC unroll 24
    for (int line = 0; line < W::kPanelStepBytes; line += 64) {
      __builtin_prefetch(w + panel * w_panel + W::kPrefetchBytes / kPanels + line);
    }
  }
}

// kOneOfMany: one of several tiles of rows, over a block of steps.
template <class W, int kRows, int kPanels, bool kOneOfMany>
void MultiplyTile(const TileTask& t) noexcept {
  constexpr int64_t kXStepBytes = W::kPhases * static_cast<int64_t>(sizeof(typename W::X));
  Sums<kRows, kPanels> sums;
  if (t.first_block == 0) {
#pragma GCC unroll 24
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel) sums.v[row][panel] = Vec16::Zero();
    }
  } else {
    ForPanels<kPanels>(
        t.columns, [&](int panel, int n) __attribute__((always_inline)) {
#pragma GCC unroll 24
          for (int row = 0; row < kRows; ++row) {
            const float* y = t.y + row * t.y_stride + panel * kPanelColumns;
            sums.v[row][panel] = n == Vec16::kLanes ? Vec16::Load(y) : Vec16::LoadTail(y, n);
          }
        });
  }

  if constexpr (kOneOfMany) {
#pragma GCC unroll 24
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
      for (int panel = 0; panel < kPanels; ++panel) {
        __builtin_prefetch(t.next_y + row * t.y_stride + panel * kPanelColumns, 1);
      }
    }
  }

  const uint8_t* next_x = t.next_x;
  const uint8_t* next_w = t.next_w;
  for (int64_t block = t.first_block; block < t.end_block; ++block) {
    const int64_t first = t.steps.First(block);
    const uint8_t* x = t.x + block * t.x_block;
    const uint8_t* const x_end = x + (t.steps.First(block + 1) - first) * kXStepBytes;
    const uint8_t* w = t.w + first * W::kPanelStepBytes;
    for (; x != x_end; x += kXStepBytes, w += W::kPanelStepBytes) {
      if constexpr (kOneOfMany) {
        __builtin_prefetch(next_x);
        __builtin_prefetch(next_w, 0, 2);  // into the second-level cache
        next_x += 64;
        next_w += W::kPanelStepBytes;
      } else if constexpr (W::kPrefetchBytes != 0) {
        PrefetchWeights<W, kPanels>(w, t.w_panel);
      }
      if constexpr (W::kIsBlock) {
        W::template AddStep<kRows>(x, kXStride<W>, w, sums.v);
      } else {
        AddPhase<W, kRows, kPanels, 0>(x, w, t.w_panel, sums);
        if constexpr (W::kPhases == 2) AddPhase<W, kRows, kPanels, 1>(x, w, t.w_panel, sums);
      }
    }
  }

  StoreSums(t, sums);
}

// Maximum panels of a tile with `rows` rows.
template <class W>
constexpr int PanelsOf(int rows) {
  const int fit = W::kTileSums / rows;
  return fit < 1 ? 1 : (fit < W::kColumnTile ? fit : W::kColumnTile);
}

using TileFunction = void (*)(const TileTask&) noexcept;

// Finds the instance for rows x panels by counting down.
template <class W, int kRows, int kPanels, bool kOneOfMany>
TileFunction FindPanels(int panels) {
  if constexpr (kPanels > 1) {
    if (panels < kPanels) return FindPanels<W, kRows, kPanels - 1, kOneOfMany>(panels);
  }
  return MultiplyTile<W, kRows, kPanels, kOneOfMany>;
}

template <class W, int kMinRows, bool kOneOfMany, int kRows>
TileFunction FindTile(int rows, int panels) {
  if constexpr (kRows > kMinRows) {
    if (rows < kRows) return FindTile<W, kMinRows, kOneOfMany, kRows - 1>(rows, panels);
  }
  return FindPanels<W, kRows, PanelsOf<W>(kRows), kOneOfMany>(panels);
}

// Maximum rows that are one tile. A single panel can have as many as there are sums: then each weight is read once.
template <class W>
constexpr int kSingleTileRows = W::kTileSums > W::kRowTile ? W::kTileSums : W::kRowTile;

template <class W>
TileFunction FindSingleTile(int rows, int panels) {
  return FindTile<W, 1, false, kSingleTileRows<W>>(rows, panels);
}

template <class W>
TileFunction FindTileOfMany(int rows, int panels) {
  // Rows are divided evenly, so the smallest tile is that of the fewest rows, or of the fewest that leave one row over.
  constexpr int kFewest = kSingleTileRows<W> + 1;
  constexpr int kFull = static_cast<int>(CeilDiv(kFewest - 1, W::kRowTile));
  constexpr int kOneOver = (kFull * W::kRowTile + 1) / (kFull + 1);
  constexpr int kOfFewest = kFewest / static_cast<int>(CeilDiv(kFewest, W::kRowTile));
  constexpr int kMinRows = kOneOver < kOfFewest ? kOneOver : kOfFewest;
  return FindTile<W, kMinRows, !W::kIsBlock, W::kRowTile>(rows, panels);
}

// Panels, a block of steps of each, that fit in a part of the second-level cache. In blocks of few bits they are
// smaller than the rows of a tile: those stay in the first-level cache while the panels pass.
template <class W>
constexpr int64_t kCachedPanels = (192 << 10) / (W::kBlockSteps * W::kPanelStepBytes);

// A task's rows in tiles, as even as possible, and its panels in groups.
struct TileGrid {
  int64_t tiles = 0;
  int64_t groups = 0;
};

template <class W>
TileGrid GridOf(const MultiplyTask& task) {
  const int64_t tiles = task.rows <= kSingleTileRows<W> ? 1 : CeilDiv(task.rows, W::kRowTile);
  const auto max_rows = static_cast<int>(CeilDiv(task.rows, tiles));
  return {tiles, CeilDiv(task.end_panel - task.first_panel, PanelsOf<W>(max_rows))};
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

TileTask FirstTile(const MultiplyTask& task, int64_t x_stride, int64_t panel_step_bytes, int64_t end_block) {
  return {.x = task.x,
          .x_block = task.rows * x_stride,
          .w_panel = task.steps.steps * panel_step_bytes,
          .steps = task.steps,
          .end_block = end_block,
          .y_stride = task.y_stride};
}

// Sets a tile's panels; its rows begin with `row`.
void SetPanels(const MultiplyTask& task, int64_t row, const PanelGroup& group, TileTask& t) {
  const int64_t column = group.Column(), columns = int64_t{group.panels} * kPanelColumns;
  t.w = task.w + group.panel * t.w_panel;
  t.bias = t.end_block == task.steps.blocks && task.bias != nullptr ? task.bias + column : nullptr;
  t.columns = columns < task.out - column ? columns : task.out - column;
  t.y = task.y + row * task.y_stride + column;
}

template <class W>
void MultiplySingleTile(const MultiplyTask& task, const TileGrid& grid) noexcept {
  TileTask t = FirstTile(task, kXStride<W>, W::kPanelStepBytes, task.steps.blocks);
  for (int64_t g = 0; g < grid.groups; ++g) {
    const PanelGroup group(task, grid, g);
    SetPanels(task, 0, group, t);
    FindSingleTile<W>(static_cast<int>(task.rows), group.panels)(t);
  }
}

// Tiles of a block of steps stay in the first-level cache while panels pass.
template <class W>
void MultiplyBlocks(const MultiplyTask& task, const TileGrid& grid) noexcept {
  TileTask t = FirstTile(task, kXStride<W>, W::kPanelStepBytes, 0);
  for (; t.first_block < task.steps.blocks; t.first_block = t.end_block) {
    t.end_block = t.first_block + 1;
    for (int64_t first = 0; first < grid.groups; first += kCachedPanels<W>) {
      const int64_t end = first + kCachedPanels<W> < grid.groups ? first + kCachedPanels<W> : grid.groups;
      for (int64_t tile = 0; tile < grid.tiles; ++tile) {
        const int64_t row = tile * task.rows / grid.tiles, end_row = (tile + 1) * task.rows / grid.tiles;
        t.x = task.x + row * kXStride<W>;
        for (int64_t g = first; g < end; ++g) {
          const PanelGroup group(task, grid, g);
          SetPanels(task, row, group, t);
          FindTileOfMany<W>(static_cast<int>(end_row - row), group.panels)(t);
        }
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
      SetPanels(task, 0, group, t);
      const float* const next_y = task.y + next.Column();
      const uint8_t* const next_w =
          task.w + next.panel * t.w_panel + (last ? end_step : first_step) * W::kPanelStepBytes;
      for (int64_t tile = 0, row = 0, end_row = 0; tile < grid.tiles; ++tile, row = end_row) {
        end_row = (tile + 1) * task.rows / grid.tiles;
        const int64_t rows = end_row - row;
        const bool last_tile = end_row == task.rows;
        t.x = task.x + row * kXStride<W>;
        t.next_x = last_tile ? block_x : block_x + end_row * kXStride<W>;
        t.next_y = last_tile ? next_y : t.y + rows * t.y_stride;
        t.next_w = tile < next.panels ? next_w + tile * t.w_panel : t.w + first_step * W::kPanelStepBytes;
        FindTileOfMany<W>(static_cast<int>(rows), group.panels)(t);
        t.y += rows * t.y_stride;
      }
    }
  }
}

template <class W>
void Multiply(const MultiplyTask& task) noexcept {
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

// Rows whose packed x (a block of steps) takes about half of a 512 KiB L2, in whole tiles; 264 for vdpbf16ps and f32.
template <class W>
constexpr int64_t kBlockRows = W::kIsBlock ? 120 : (288 << 10) / (kXStride<W> * W::kRowTile) * int64_t{W::kRowTile};

template <class W>
constexpr WeightKernels kWeightKernels{.step_k = W::kStepK,
                                       .block_steps = W::kBlockSteps,
                                       .block_rows = kBlockRows<W>,
                                       .tile_panels = PanelsOf<W>(W::kRowTile),
                                       .x_stride = kXStride<W>,
                                       .panel_step_bytes = W::kPanelStepBytes,
                                       .pack = Pack<W>,
                                       .multiply = Multiply<W>};

}  // namespace
}  // namespace kvanta::kernels
