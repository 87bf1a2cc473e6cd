// Matrix product of quantized weights (group_quant_layout.h) by AMX tiles: a panel's codes are decoded to tiles of
// bf16, exactly, once for all rows, and x is rounded to bf16. A group's sum is computed in a tile, from zero, and then
// multiplied by the group's scale: y += scale * sum. Few rows reproduce the tiles' order of sums with vectors. Included
// by isa_amx.cc.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "kernels/linear/cpu/group_quant_layout.h"
#include "kernels/linear/cpu/x86/amx.h"

namespace kvanta::kernels {
namespace {

template <class Layout>
struct QuantizedTiles {
  using Codes = typename Layout::Codes;
  static constexpr int kStepTiles = Layout::kStepK / kTileK;
  static constexpr int kGroupTiles = Layout::kGroup / kTileK;
  static constexpr int kBlockSteps = 4;
  static constexpr int kPairs = kTileK / 2;
  static constexpr int64_t kAhead = 4096;  // prefetch distance in bytes
  static_assert(kGroupTiles >= 1);

  // Tiles of x: [blocks of steps][16 rows][tiles of the block], each [16][64 bytes].
  static KVANTA_INLINE int64_t TileOfX(int64_t rows, const StepBlocks& steps, int64_t block, int64_t row) {
    return kStepTiles * kernels::TileOfX(rows, steps, block, row);
  }

  static void Pack(const PackTask& task) noexcept {
    const __m512i upper_words = _mm512_load_si512(kInOrderWords.words);
    for (int64_t block = 0; block < task.steps.blocks; ++block) {
      const int64_t first = task.steps.First(block) * kStepTiles, end = task.steps.First(block + 1) * kStepTiles;
      for (int64_t row = task.first_row; row < task.end_row; ++row) {
        uint8_t* out = task.out + TileOfX(task.rows, task.steps, block, row) + row % kTileRows * 64;
        for (int64_t tile = first; tile < end; ++tile, out += kTileBytes) {
          const int64_t left = task.k - tile * kTileK;
          const uint32_t valid = left >= kTileK ? ~0U : left <= 0 ? 0U : (1U << left) - 1U;
          const float* x = task.x + row * task.k;
          alignas(64) float ordered[kTileK];
          if (left > 0 && task.order != nullptr) {
            for (int64_t i = 0; i < (left < kTileK ? left : kTileK); ++i) ordered[i] = x[task.order[tile * kTileK + i]];
            x = ordered;
          } else if (left > 0) {  // where nothing is read, no address beyond x is formed
            x += tile * kTileK;
          }
          const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid), x);
          const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid >> 16), x + 16);
          _mm512_store_si512(out,
                             _mm512_permutex2var_epi16(RoundVec16ToBf16(low), upper_words, RoundVec16ToBf16(high)));
        }
      }
    }
  }

  static void Multiply(const MultiplyTask& task) noexcept {
    const FlushSubnormals flush;  // as tiles do
    switch (task.rows) {
      case 1:
        return MultiplyFew<1>(task);
      case 2:
        return MultiplyFew<2>(task);
      case 3:
        return MultiplyFew<3>(task);
      case 4:
        return MultiplyFew<4>(task);
      default:
        break;
    }
    Tiles::Configure();
    for (int64_t panel = task.first_panel; panel < task.end_panel; ++panel) {
      for (int64_t block = 0; block < task.steps.blocks; ++block) MultiplyPanel(task, panel, block);
    }
    Tiles::Release();
  }

  static constexpr WeightKernels kKernels{.step_k = Layout::kStepK,
                                          .block_steps = kBlockSteps,
                                          .block_rows = kTileBlockRows,
                                          .x_stride = int64_t{kBlockSteps} * kStepTiles * 64,
                                          .panel_step_bytes = Layout::kPanelStepBytes,
                                          .pack = Pack,
                                          .multiply = Multiply};

 private:
  static KVANTA_INLINE const uint8_t* StepOf(const MultiplyTask& task, int64_t panel, int64_t step) {
    return task.w + (panel * task.steps.steps + step) * Layout::kPanelStepBytes;
  }
  static KVANTA_INLINE int Columns(const MultiplyTask& task, int64_t panel) {
    const int64_t left = task.out - panel * kPanelColumns;
    return left < kPanelColumns ? static_cast<int>(left) : kPanelColumns;
  }
  static KVANTA_INLINE Vec16::F Bias(const MultiplyTask& task, int64_t panel) {
    return Vec16::LoadTail(task.bias + panel * kPanelColumns, Columns(task, panel));
  }

  // ---- many rows

  // tiles: [steps of the block][kStepTiles], each [16 pairs of k][16 columns][2 bf16].
  static KVANTA_INLINE void Decode(const uint8_t* w, int64_t steps, uint8_t* tiles) {
    const Codes codes;
    const __m512i upper = _mm512_set1_epi32(-0x10000);
    for (int64_t step = 0; step < steps; ++step, w += Layout::kPanelStepBytes) {
      for (int group = 0; group < Layout::kGroups; ++group) {
        const Vec16::F zero = Layout::Zero(w, group);
        for (int pair = 0; pair < Layout::kGroup / 2; ++pair, tiles += 64) {
          const uint8_t* p = w + (group * Layout::kGroup / 2 + pair) * Codes::kPairBytes;
          __builtin_prefetch(p + kAhead);
          Vec16::F even, odd;
          codes.Load(p, zero, even, odd);
          const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
          const __m512i high = _mm512_and_si512(_mm512_castps_si512(odd), upper);
          _mm512_store_si512(tiles, _mm512_or_si512(low, high));
        }
      }
    }
  }

  static void MultiplyPanel(const MultiplyTask& task, int64_t panel, int64_t block) noexcept {
    alignas(64) uint8_t tiles[kBlockSteps * kStepTiles * kTileBytes];
    const int64_t first = task.steps.First(block), steps = task.steps.First(block + 1) - first;
    const uint8_t* w = StepOf(task, panel, first);
    Decode(w, steps, tiles);
    const auto groups = static_cast<int>(steps) * Layout::kGroups;
    for (int64_t row = 0; row < task.rows; row += kTileRows) {
      const uint8_t* x = task.x + TileOfX(task.rows, task.steps, block, row);
      for (int group = 0; group < groups; group += kTilesUnroll) {
        const int count = groups - group < kTilesUnroll ? groups - group : kTilesUnroll;
        AddGroups(x, tiles, group, count);
        const bool is_first = block == 0 && group == 0;
        const bool is_last = block + 1 == task.steps.blocks && group + count == groups;
        AddScaled(task, {panel, row, is_first, is_last}, w, group, count);
      }
    }
  }

  // Sums of up to four groups in as many tiles.
  static KVANTA_INLINE void AddGroups(const uint8_t* x, const uint8_t* w, int group, int count) {
    ForTiles<kTilesUnroll>([&](auto index) __attribute__((always_inline)) {
      if (decltype(index)::kValue < count) Tiles::Zero<decltype(index)::kValue>();
    });
    for (int tile = 0; tile < kGroupTiles; ++tile) {
      ForTiles<kTilesUnroll>([&](auto index) __attribute__((always_inline)) {
        constexpr int kSum = decltype(index)::kValue, kX = kFirstOperand + kSum % 2, kW = kSecondOperand + kSum % 2;
        if (kSum >= count) return;
        const int64_t at = int64_t{(group + kSum) * kGroupTiles + tile} * kTileBytes;
        Tiles::Load<kX>(x + at, 64);
        Tiles::Load<kW>(w + at, 64);
        Tiles::DotBf16<kSum, kX, kW>();
      });
    }
  }

  // Place of a tile of sums in y.
  struct Place {
    int64_t panel = 0;
    int64_t row = 0;
    bool is_first = false;
    bool is_last = false;
  };

  // y += scale * sums, groups in ascending order.
  static KVANTA_INLINE void AddScaled(const MultiplyTask& task, const Place& place, const uint8_t* w, int group,
                                      int count) {
    alignas(64) float sums[kTilesUnroll][kTileRows][kPanelColumns];
    Vec16::F scales[kTilesUnroll];
    ForTiles<kTilesUnroll>([&](auto index) __attribute__((always_inline)) {
      constexpr int kSum = decltype(index)::kValue;
      if (kSum >= count) return;
      Tiles::Store<kSum>(reinterpret_cast<uint8_t*>(sums[kSum]), sizeof sums[kSum][0]);
      const int at = group + kSum;
      scales[kSum] = Layout::Scale(w + at / Layout::kGroups * Layout::kPanelStepBytes, at % Layout::kGroups);
    });
    const int columns = Columns(task, place.panel);
    const bool has_bias = place.is_last && task.bias != nullptr;
    const Vec16::F bias = has_bias ? Bias(task, place.panel) : Vec16::Zero();
    const int64_t left = task.rows - place.row;
    for (int row = 0; row < (left < kTileRows ? left : kTileRows); ++row) {
      float* y = task.y + (place.row + row) * task.y_stride + place.panel * kPanelColumns;
      Vec16::F sum = place.is_first ? Vec16::Zero() : Vec16::LoadTail(y, columns);
      for (int i = 0; i < count; ++i) sum = Vec16::Fma(Vec16::Load(sums[i][row]), scales[i], sum);
      Vec16::StoreTail(y, has_bias ? Vec16::Add(sum, bias) : sum, columns);
    }
  }

  // ---- few rows: the order of sums of a tile product, with vectors

  template <int kRows>
  static void MultiplyFew(const MultiplyTask& task) noexcept {
    for (int64_t panel = task.first_panel; panel < task.end_panel; ++panel) {
      Vec16::F sums[kRows];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) sums[row] = Vec16::Zero();
      const uint8_t* x = task.x;  // the only tile of rows
      for (int64_t step = 0; step < task.steps.steps; ++step) AddStep<kRows>(StepOf(task, panel, step), x, sums);
      const int columns = Columns(task, panel);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Vec16::F sum = task.bias != nullptr ? Vec16::Add(sums[row], Bias(task, panel)) : sums[row];
        Vec16::StoreTail(task.y + row * task.y_stride + panel * kPanelColumns, sum, columns);
      }
    }
  }

  // Advances x to the next step.
  template <int kRows>
  static KVANTA_INLINE void AddStep(const uint8_t* w, const uint8_t*& x, Vec16::F* sums) {
    const Codes codes;
    const uint8_t* p = w;
    for (int group = 0; group < Layout::kGroups; ++group) {
      const Vec16::F zero = Layout::Zero(w, group);
      Vec16::F group_sums[kRows];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) group_sums[row] = Vec16::Zero();
      for (int tile = 0; tile < kGroupTiles; ++tile, x += kTileBytes) {
        Vec16::F first[kRows], second[kRows];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) first[row] = second[row] = Vec16::Zero();
#pragma GCC unroll 16
        for (int pair = 0; pair < kPairs; ++pair, p += Codes::kPairBytes) {
          __builtin_prefetch(p + kAhead);
          Vec16::F even, odd;
          codes.Load(p, zero, even, odd);
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            const PairLanes a(Broadcast32(x + row * 64 + pair * 4));
            first[row] = Vec16::Fma(a.first, even, first[row]);
            second[row] = Vec16::Fma(a.second, odd, second[row]);
          }
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          group_sums[row] = Vec16::Add(group_sums[row], Vec16::Add(first[row], second[row]));
        }
      }
      const Vec16::F scale = Layout::Scale(w, group);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) sums[row] = Vec16::Fma(group_sums[row], scale, sums[row]);
    }
  }
};

// NF4's values are not exact in bf16, and NVFP4's groups are half a tile.
template <int kFormat>
inline constexpr bool kHasTiles = weights::kKernelFormats[kFormat].codes !=
                                  weights::CodeType::kNf4&& weights::kKernelFormats[kFormat].group >= kTileK;

template <int kFormat = 0>
void SetQuantizedTiles(QuantizedKernels& kernels) {
  if constexpr (kFormat < weights::kKernelFormatCount) {
    if constexpr (kHasTiles<kFormat>) kernels.of[kFormat] = QuantizedTiles<LayoutOfFormat<kFormat>>::kKernels;
    SetQuantizedTiles<kFormat + 1>(kernels);
  }
}

}  // namespace
}  // namespace kvanta::kernels
