// Register tile of a matrix product, written once over the Vec16 of the including ISA unit for every storage of W:
// kRows rows x kPanels panels of 16 columns.
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
  const uint8_t* w = nullptr;  // first panel, first step of first_block
  int64_t w_panel = 0;         // bytes from panel to panel
  StepBlocks steps;
  int64_t first_block = 0;
  int64_t end_block = 0;
  const float* bias = nullptr;  // bias of the tile's first column, or null
  float* y = nullptr;           // the tile's first element
  int64_t y_stride = 0;
  int64_t columns = 0;  // valid, of 16 * panels
  int64_t rows = 0;     // valid: all rows of the tile, or all but the last one
  // Operands of tiles to come, which a tile of many prefetches: of x and W a line per step.
  const uint8_t* next_x = nullptr;
  const uint8_t* next_w = nullptr;
  const float* next_y = nullptr;
};

// Rows of the smallest tile that holds `rows`: an even number from 4 on, which halves the instances. A row too many is
// computed from what follows x's rows in memory, and is not stored.
constexpr int TileRows(int rows) {
  return rows <= 4 ? rows : static_cast<int>(RoundUp(rows, 2));
}
template <int kRows>
KVANTA_INLINE bool HasRow(const TileTask& t, int row) {
  return TileRows(kRows - 1) != kRows || row + 1 < kRows || t.rows == kRows;
}

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
      if (!HasRow<kRows>(t, row)) break;
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
          if (!HasRow<kRows>(t, row)) break;
          const Vec16::F sum = sums.v[row][panel];
          Vec16::StoreTail(y + row * y_stride + panel * kPanelColumns, bias != nullptr ? Vec16::Add(sum, added) : sum,
                           n);
        }
      });
}

// Prefetches what a single tile of rows, which streams its panels from memory, reads kPrefetchBytes later: at the end
// of the panels, the start of the next tile's, which follow them in memory.
template <class W, int kPanels>
class WeightPrefetcher {
 public:
  KVANTA_INLINE WeightPrefetcher(const uint8_t* w, int64_t w_panel)
      : next_(w + W::kPrefetchBytes / kPanels), end_(w + w_panel), w_panel_(w_panel) {}

  KVANTA_INLINE void Step() {
    if (next_ >= end_) {
      next_ += (kPanels - 1) * w_panel_;
      end_ += kPanels * w_panel_;
    }
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma GCC unroll 24
      for (int line = 0; line < W::kPanelStepBytes; line += 64) {
        __builtin_prefetch(next_ + panel * w_panel_ + line);
      }
    }
    next_ += W::kPanelStepBytes;
  }

 private:
  const uint8_t* next_;
  const uint8_t* end_;  // end of the first panel
  int64_t w_panel_;
};

// kOneOfMany: one of several tiles of rows, over a block of steps; of weights in blocks, such a tile has no code of its
// own.
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
            if (!HasRow<kRows>(t, row)) {
              sums.v[row][panel] = Vec16::Zero();
              break;
            }
            const float* y = t.y + row * t.y_stride + panel * kPanelColumns;
            sums.v[row][panel] = n == Vec16::kLanes ? Vec16::Load(y) : Vec16::LoadTail(y, n);
          }
        });
  }

  constexpr bool kPrefetchesNext = kOneOfMany && !W::kIsBlock;  // blocks: AddStep prefetches
  constexpr bool kPrefetchesWeights = !kPrefetchesNext && W::kPrefetchBytes != 0;
  [[maybe_unused]] WeightPrefetcher<W, kPanels> weights(t.w, t.w_panel);
  if constexpr (kPrefetchesNext) {
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
    const uint8_t* w = t.w + (first - t.steps.First(t.first_block)) * W::kPanelStepBytes;
    for (; x != x_end; x += kXStepBytes, w += W::kPanelStepBytes) {
      if constexpr (kPrefetchesNext) {
        __builtin_prefetch(next_x);
        __builtin_prefetch(next_w, 0, 2);  // into the second-level cache
        next_x += 64;
        next_w += W::kPanelStepBytes;
      } else if constexpr (kPrefetchesWeights) {
        weights.Step();
      }
      if constexpr (W::kIsBlock) {
        W::template AddStep<kRows, kPanels>(x, kXStride<W>, w, t.w_panel, sums.v);
      } else {
        AddPhase<W, kRows, kPanels, 0>(x, w, t.w_panel, sums);
        if constexpr (W::kPhases == 2) AddPhase<W, kRows, kPanels, 1>(x, w, t.w_panel, sums);
      }
    }
  }

  StoreSums(t, sums);
}

// Maximum panels of a tile with `rows` rows, the only one or one of many.
template <class W>
constexpr int PanelsOf(int rows, bool one_of_many) {
  if (W::kIsBlock && !one_of_many) return 1;  // a single stream from memory
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
  constexpr bool kDiffers = kOneOfMany && !W::kIsBlock;
  return MultiplyTile<W, kRows, kPanels, kDiffers>;
}

template <class W, int kMinRows, bool kOneOfMany, int kRows>
TileFunction FindTile(int rows, int panels) {
  constexpr int kFewer = kRows > 4 ? kRows - 2 : kRows - 1;
  if constexpr (kFewer >= kMinRows) {
    if (rows <= kFewer) return FindTile<W, kMinRows, kOneOfMany, kFewer>(rows, panels);
  }
  return FindPanels<W, kRows, PanelsOf<W>(kRows, kOneOfMany), kOneOfMany>(panels);
}

// Maximum rows that are one tile. A single panel can have as many as there are sums: then each weight is read once.
template <class W>
constexpr int kSingleTileRows = W::kTileSums > W::kRowTile ? W::kTileSums : W::kRowTile;

// Rows of one of many tiles are a multiple of this, but for the last tile.
template <class W>
constexpr int64_t kRowUnit = W::kRowTile > 4 ? 2 : 1;

// First row of a tile, or the end of the last one, in a division of rows into tiles as even as whole units allow.
template <class W>
constexpr int64_t FirstRow(int64_t tile, int64_t tiles, int64_t rows) {
  const int64_t row = tile * CeilDiv(rows, kRowUnit<W>) / tiles * kRowUnit<W>;
  return row < rows ? row : rows;
}

// Rows of the smallest tile, the last one aside: divided evenly, the fewest rows that need one tile more.
template <class W>
constexpr int MinRowsOfMany() {
  int min = W::kRowTile;
  for (int64_t rows = kSingleTileRows<W> + 1; rows <= kSingleTileRows<W> + W::kRowTile; ++rows) {
    const int64_t tiles = CeilDiv(rows, W::kRowTile);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const auto height = static_cast<int>(FirstRow<W>(tile + 1, tiles, rows) - FirstRow<W>(tile, tiles, rows));
      if (height < min) min = height;
    }
  }
  return TileRows(min);
}

template <class W>
TileFunction FindSingleTile(int rows, int panels) {
  return FindTile<W, 1, false, TileRows(kSingleTileRows<W>)>(rows, panels);
}

template <class W>
TileFunction FindTileOfMany(int rows, int panels) {
  return FindTile<W, MinRowsOfMany<W>(), true, TileRows(W::kRowTile)>(rows, panels);
}

}  // namespace
}  // namespace kvanta::kernels
