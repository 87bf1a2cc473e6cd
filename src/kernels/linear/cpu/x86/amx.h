// Matrix product of bf16 weights by AMX tiles (tiles_amx.h): 16 pairs of k of a panel are stored as a second operand. A
// tile product adds 32 products to a sum in an order of its own; few rows, for which tiles do not pay, reproduce that
// order with vectors. Included by isa_amx.cc.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/tiles_amx.h"
#include "kernels/cpu/x86/vec16_avx512.h"
#include "kernels/cpu/x86/word_order.h"
#include "kernels/linear/cpu/table.h"

namespace kvanta::kernels {
namespace {

// A step is a tile: 32 k.
inline constexpr int kTileK = 32;
inline constexpr int kTileBlockSteps = 64;
inline constexpr int64_t kTileBlockRows = 256;   // with a block of steps, 1 MiB of x: half of the L2 cache
inline constexpr int64_t kPrefetchBytes = 2048;  // prefetch distance in a panel that is read from memory

// Offset of a row in the tiles of x: [blocks of steps][16 rows][steps of the block], each [16][64 bytes].
KVANTA_INLINE int64_t TileOfX(int64_t rows, const StepBlocks& steps, int64_t block, int64_t row) {
  const int64_t first = steps.First(block), count = steps.First(block + 1) - first;
  return (first * CeilDiv(rows, kTileRows) + row / kTileRows * count) * kTileBytes;
}

// Rounds to the nearest bf16, ties to even, in the upper halves of lanes; NaN stays NaN.
KVANTA_INLINE __m512i RoundVec16ToBf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
}

void PackTiles(const PackTask& task) noexcept {
  const __m512i upper_words = _mm512_load_si512(kInOrderWords.words);
  for (int64_t block = 0; block < task.steps.blocks; ++block) {
    for (int64_t row = task.first_row; row < task.end_row; ++row) {
      const float* x = task.x + row * task.k;
      uint8_t* out = task.out + TileOfX(task.rows, task.steps, block, row) + row % kTileRows * 64;
      for (int64_t step = task.steps.First(block); step < task.steps.First(block + 1); ++step, out += kTileBytes) {
        const int64_t k = step * kTileK, left = task.k - k;
        const uint32_t valid = left >= kTileK ? ~0U : (1U << left) - 1U;
        const __m512 first = _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid), x + k);
        const __m512 second = _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid >> 16), x + k + 16);
        _mm512_store_si512(out,
                           _mm512_permutex2var_epi16(RoundVec16ToBf16(first), upper_words, RoundVec16ToBf16(second)));
      }
    }
  }
}

// ---- many rows: two tiles of rows with two panels, or one with up to four

// kTiles tiles of rows and kPanels panels, over a block of steps.
struct StepRange {
  const uint8_t* x = nullptr;  // the first tile of rows
  const uint8_t* w = nullptr;  // the first panel
  int64_t w_panel = 0;         // bytes from panel to panel
  int64_t steps = 0;
  bool streams = false;  // the weights are read from memory
  // Weights of the next panels, of which each step prefetches so many lines.
  const uint8_t* next_w = nullptr;
  int64_t next_lines = 0;
};

template <int kTiles, int kPanels>
KVANTA_INLINE void AddSteps(const StepRange& range) {
  for (int64_t step = 0; step < range.steps; ++step) {
    const uint8_t* x = range.x + step * kTileBytes;
    Tiles::Load<kFirstOperand>(x, 64);
    if constexpr (kTiles == 2) Tiles::Load<kFirstOperand + 1>(x + range.steps * kTileBytes, 64);
    for (int64_t line = step * range.next_lines; line < (step + 1) * range.next_lines; ++line) {
      __builtin_prefetch(range.next_w + line * 64, 0, 2);  // into the second-level cache
    }
    ForTiles<kPanels>([&](auto panel) __attribute__((always_inline)) {
      constexpr int kPanel = decltype(panel)::kValue, kOfPanel = kSecondOperand + kPanel % 2;
      const uint8_t* w = range.w + kPanel * range.w_panel + step * kTileBytes;
      if (range.streams) {
#pragma GCC unroll 16
        for (int line = 0; line < kTileRows; ++line) __builtin_prefetch(w + kPrefetchBytes + line * 64);
      }
      Tiles::Load<kOfPanel>(w, 64);
      Tiles::DotBf16<kPanel * kTiles, kFirstOperand, kOfPanel>();
      if constexpr (kTiles == 2) Tiles::DotBf16<kPanel * kTiles + 1, kFirstOperand + 1, kOfPanel>();
    });
  }
}

// A tile of sums in y.
struct TileOfSums {
  float* y = nullptr;
  int64_t y_stride = 0;
  int rows = 0;
  int columns = 0;
};

template <int kTile>
KVANTA_INLINE void LoadSums(const TileOfSums& sums) {
  if (sums.columns == kPanelColumns) {
    return Tiles::Load<kTile>(reinterpret_cast<const uint8_t*>(sums.y), sums.y_stride * 4);
  }
  alignas(64) float workspace[kTileRows][kPanelColumns];
  for (int row = 0; row < sums.rows; ++row) {
    Vec16::Store(workspace[row], Vec16::LoadTail(sums.y + row * sums.y_stride, sums.columns));
  }
  Tiles::Load<kTile>(reinterpret_cast<const uint8_t*>(workspace), sizeof workspace[0]);
}

// bias: of the tile's columns, or null.
template <int kTile>
KVANTA_INLINE void StoreSums(const TileOfSums& sums, const float* bias) {
  if (sums.columns == kPanelColumns && bias == nullptr) {
    return Tiles::Store<kTile>(reinterpret_cast<uint8_t*>(sums.y), sums.y_stride * 4);
  }
  alignas(64) float workspace[kTileRows][kPanelColumns];
  Tiles::Store<kTile>(reinterpret_cast<uint8_t*>(workspace), sizeof workspace[0]);
  const Vec16::F added = bias != nullptr ? Vec16::LoadTail(bias, sums.columns) : Vec16::Zero();
  for (int row = 0; row < sums.rows; ++row) {
    const Vec16::F sum = Vec16::Load(workspace[row]);
    Vec16::StoreTail(sums.y + row * sums.y_stride, bias != nullptr ? Vec16::Add(sum, added) : sum, sums.columns);
  }
}

// Rows in groups of kTiles tiles; the last tile of each has `last_rows` rows, the others 16.
struct RowGroups {
  int64_t first_row = 0;
  int64_t end_row = 0;
  int last_rows = 0;
};

// Blocks of steps during which sums stay in tiles, for adjacent panels from `panel` on.
struct PanelBlock {
  int64_t panel = 0;
  int64_t first_block = 0;
  int64_t end_block = 0;
};

template <int kTiles, int kPanels>
void MultiplyPanels(const MultiplyTask& task, const RowGroups& groups, const PanelBlock& at) noexcept {
  const int64_t column = at.panel * kPanelColumns;
  const int64_t w_panel = task.steps.steps * kTileBytes;
  const int64_t group_rows = (kTiles - 1) * kTileRows + groups.last_rows;
  const float* bias = at.end_block == task.steps.blocks ? task.bias : nullptr;
  // While groups of rows pass over these panels' block, each prefetches a part of one of the next panels'.
  const int64_t passes = (groups.end_row - groups.first_row) / group_rows;
  const bool same_block = at.panel + int64_t{2} * kPanels <= task.end_panel;
  const int64_t next_block = same_block ? at.first_block : at.end_block;
  const int64_t next_panel = same_block ? at.panel + kPanels : task.first_panel;
  const bool prefetches = kTiles == 2 && passes > 1 && next_block < task.steps.blocks;
  const int64_t next_lines = prefetches ? CeilDiv(kTileRows, CeilDiv(passes, kPanels)) : 0;
  int64_t passed = 0;
  for (int64_t row = groups.first_row; row < groups.end_row; row += group_rows, ++passed) {
    const auto sums = [&](int tile) __attribute__((always_inline)) {
      const int64_t tile_row = row + tile % kTiles * kTileRows, tile_column = column + tile / kTiles * kPanelColumns;
      const int64_t columns = task.out - tile_column;
      return TileOfSums{.y = task.y + tile_row * task.y_stride + tile_column,
                        .y_stride = task.y_stride,
                        .rows = tile % kTiles == kTiles - 1 ? groups.last_rows : kTileRows,
                        .columns = columns < kPanelColumns ? static_cast<int>(columns) : kPanelColumns};
    };
    ForTiles<kTiles * kPanels>([&](auto tile) __attribute__((always_inline)) {
      constexpr int kTile = decltype(tile)::kValue;
      if (at.first_block == 0) {
        Tiles::Zero<kTile>();
      } else {
        LoadSums<kTile>(sums(kTile));
      }
    });
    for (int64_t block = at.first_block; block < at.end_block; ++block) {
      const int64_t step = task.steps.First(block);
      AddSteps<kTiles, kPanels>({.x = task.x + TileOfX(task.rows, task.steps, block, row),
                                 .w = task.w + at.panel * w_panel + step * kTileBytes,
                                 .w_panel = w_panel,
                                 .steps = task.steps.First(block + 1) - step,
                                 .streams = kTiles == 1,
                                 .next_w = task.w + (next_panel + passed % kPanels) * w_panel +
                                           task.steps.First(next_block) * kTileBytes +
                                           passed / kPanels * next_lines * (task.steps.First(block + 1) - step) * 64,
                                 .next_lines = next_lines});
    }
    ForTiles<kTiles * kPanels>([&](auto tile) __attribute__((always_inline)) {
      constexpr int kTile = decltype(tile)::kValue;
      StoreSums<kTile>(sums(kTile), bias != nullptr ? bias + column + kTile / kTiles * kPanelColumns : nullptr);
    });
  }
}

// Calls f(Index<n>, panel) for all panels, n = kMax or 1 at a time.
template <int kMax, class F>
KVANTA_INLINE void ForPanelsOf(const MultiplyTask& task, F f) {
  int64_t panel = task.first_panel;
  for (; task.end_panel - panel >= kMax; panel += kMax) f(Index<kMax>{}, panel);
  for (; panel < task.end_panel; ++panel) f(Index<1>{}, panel);
}

template <int kTiles>
void MultiplyGroups(const MultiplyTask& task, const RowGroups& groups) noexcept {
  TileShapes shapes;
  const auto last_rows = static_cast<uint8_t>(groups.last_rows);
  for (int sum = kTiles - 1; sum < kTilesUnroll; sum += kTiles) shapes.rows[sum] = last_rows;
  shapes.rows[kFirstOperand + kTiles - 1] = last_rows;
  Tiles::Configure(shapes);
  // With a single group of rows each weight is used once.
  const bool single_group = groups.end_row - groups.first_row <= kTiles * kTileRows;
  const int64_t blocks_at_once = single_group ? task.steps.blocks : 1;
  for (int64_t block = 0; block < task.steps.blocks; block += blocks_at_once) {
    ForPanelsOf<kTilesUnroll / kTiles>(
        task, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
          MultiplyPanels<kTiles, decltype(panels)::kValue>(task, groups, {panel, block, block + blocks_at_once});
        });
  }
  Tiles::Release();
}

// ---- few rows: the order of sums of a tile product, with vectors

// Flushes subnormals to 0, read or written, for the current scope.
class FlushSubnormals {
 public:
  FlushSubnormals() : control_(_mm_getcsr()) { _mm_setcsr(control_ | 0x8040U); }
  ~FlushSubnormals() { _mm_setcsr(control_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  uint32_t control_;
};

// The first and the second elements of pairs of bf16, as f32.
struct PairLanes {
  __m512 first, second;

  explicit KVANTA_INLINE PairLanes(__m512i pairs)
      : first(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))),
        second(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))) {}
};

template <int kRows, int kPanels>
void MultiplyFewRows(const MultiplyTask& task, int64_t panel) noexcept {
  const int64_t w_panel = task.steps.steps * kTileBytes;
  const uint8_t* w = task.w + panel * w_panel;
  const uint8_t* x = task.x;  // the only tile of rows, by blocks of steps
  Vec16::F sums[kRows][kPanels];
  for (auto& tile_row : sums) {
    for (Vec16::F& sum : tile_row) sum = Vec16::Zero();
  }
  for (int64_t step = 0; step < task.steps.steps; ++step, x += kTileBytes, w += kTileBytes) {
    Vec16::F first[kRows][kPanels], second[kRows][kPanels];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) first[row][p] = second[row][p] = Vec16::Zero();
    }
#pragma GCC unroll 16
    for (int line = 0; line < kTileRows; ++line) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* weights = w + p * w_panel + line * 64;
        __builtin_prefetch(weights + kPrefetchBytes);
        const PairLanes b(_mm512_loadu_si512(weights));
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const PairLanes a(Broadcast32(x + row * 64 + line * 4));
          first[row][p] = Vec16::Fma(a.first, b.first, first[row][p]);
          second[row][p] = Vec16::Fma(a.second, b.second, second[row][p]);
        }
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        sums[row][p] = Vec16::Add(sums[row][p], Vec16::Add(first[row][p], second[row][p]));
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) {
    const int64_t column = (panel + p) * kPanelColumns, left = task.out - column;
    const int columns = left < kPanelColumns ? static_cast<int>(left) : kPanelColumns;
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      Vec16::F sum = sums[row][p];
      if (task.bias != nullptr) sum = Vec16::Add(sum, Vec16::LoadTail(task.bias + column, columns));
      Vec16::StoreTail(task.y + row * task.y_stride + column, sum, columns);
    }
  }
}

template <int kRows>
void MultiplyRows(const MultiplyTask& task) noexcept {
  ForPanelsOf<kRows == 1 ? 4 : 2>(
      task, [&](auto panels, int64_t panel)
                __attribute__((always_inline)) { MultiplyFewRows<kRows, decltype(panels)::kValue>(task, panel); });
}

void MultiplyTiles(const MultiplyTask& task) noexcept {
  const FlushSubnormals flush;  // as tiles do: sums of few rows, and the bias of all
  switch (task.rows) {
    case 1:
      return MultiplyRows<1>(task);
    case 2:
      return MultiplyRows<2>(task);
    case 3:
      return MultiplyRows<3>(task);
    case 4:
      return MultiplyRows<4>(task);
    default:
      break;
  }
  constexpr int64_t kGroup = int64_t{2} * kTileRows;
  const int64_t whole = task.rows / kGroup * kGroup;
  const int rest = static_cast<int>(task.rows - whole);
  if (whole > 0) MultiplyGroups<2>(task, {0, whole, kTileRows});
  if (rest > kTileRows) MultiplyGroups<2>(task, {whole, task.rows, rest - kTileRows});
  if (rest > 0 && rest <= kTileRows) MultiplyGroups<1>(task, {whole, task.rows, rest});
}

constexpr WeightKernels kBf16TileKernels{.step_k = kTileK,
                                         .block_steps = kTileBlockSteps,
                                         .block_rows = kTileBlockRows,
                                         .tile_panels = 2,
                                         .x_stride = int64_t{kTileBlockSteps} * 64,
                                         .panel_step_bytes = kTileBytes,
                                         .pack = PackTiles,
                                         .multiply = MultiplyTiles};

}  // namespace
}  // namespace kvanta::kernels
