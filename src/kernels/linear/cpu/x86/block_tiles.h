// Matrix products of weights in blocks by AMX tiles, for many rows. Packed x and panels are those of the AVX-512 unit,
// and so are the bits of the results: dots are exact, and everything else is in the same order.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/cpu/x86/tiles_amx.h"
#include "kernels/linear/cpu/block_weight.h"
#include "kernels/linear/cpu/kernels.h"
#include "kernels/linear/cpu/x86/blocks_avx512.h"

namespace kvanta::kernels {
namespace {

// With fewer rows, dots of vectors are faster.
inline constexpr int64_t kMinTileRows = 6;
// Rows of x that are packed at a time: whole tiles, of which the last one may read rows that do not exist.
inline constexpr int64_t kTiledRows = 128;
// Prefetch distance in a panel.
inline constexpr int64_t kTilePrefetchBytes = 4096;

template <BlockLayout kLayout, bool kIsWide>
class BlockTiles {
 public:
  static void Multiply(const MultiplyTask& task) noexcept {
    if (task.rows < kMinTileRows) return kernels::Multiply<W>(task);
    Tiles::Configure(Shapes());
    Panel panel;
    for (int64_t block = 0; block < task.steps.blocks; ++block) {
      for (int64_t p = task.first_panel; p < task.end_panel; ++p) {
        Unpack(task, p, block, panel);
        for (int64_t row = 0; row < task.rows; row += kTileRows) AddTile(task, p, block, row, panel);
      }
    }
    Tiles::Release();
  }

 private:
  using W = BlockWeight<kLayout, kIsWide>;
  using Block = typename W::Block;
  static constexpr int kSubs = kLayout.Subs();
  static constexpr int kMaxBlocks = W::kBlockSteps * kLayout.blocks;
  static constexpr int kSubCodeBytes = kLayout.sub * kBlockColumns;

  // Tile registers: sums (of the high terms, and of the low ones), activations, weights.
  static constexpr int kSums = 0, kLowSums = 1, kX = kFirstOperand, kWeights = kSecondOperand;

  // A block of steps of a panel, unpacked: second operands of products, and the scales.
  struct Panel {
    alignas(64) uint8_t codes[kMaxBlocks * kBlockK * kBlockColumns];
    alignas(64) float scales[kMaxBlocks * kSubs][kBlockColumns];
    alignas(64) float offsets[kLayout.has_offset ? kMaxBlocks * kSubs : 1][kBlockColumns];
    int blocks = 0;
  };

  static constexpr TileShapes Shapes() {
    TileShapes shapes;
    shapes.row_bytes[kX] = kLayout.sub;
    shapes.rows[kWeights] = kLayout.sub / 4;
    return shapes;
  }

  template <int kQuad = 0>
  static KVANTA_INLINE void UnpackBlock(const uint8_t* w, uint8_t* out) {
    const __m512i codes = UnpackQuad<Bytes16, kLayout, kQuad>(w);
    _mm512_store_si512(out + kQuad * 64, kLayout.code_offset == 0 ? codes : Bytes16::Sub(codes, kLayout.code_offset));
    if constexpr (kQuad < 7) UnpackBlock<kQuad + 1>(w, out);
  }

  static void Unpack(const MultiplyTask& task, int64_t p, int64_t block, Panel& panel) noexcept {
    const int64_t first = task.steps.First(block), end = task.steps.First(block + 1);
    const uint8_t* w = task.w + (p * task.steps.steps + first) * W::kPanelStepBytes;
    panel.blocks = static_cast<int>(end - first) * kLayout.blocks;
    uint8_t* codes = panel.codes;
    int sub = 0;
    for (int64_t step = first; step < end; ++step, w += W::kPanelStepBytes) {
      const StepScales<kLayout> scales(w);
      for (int i = 0; i < kLayout.blocks * kSubs; ++i, ++sub) {
        Vec16::Store(panel.scales[sub], scales.Scale(i));
        if constexpr (kLayout.has_offset) Vec16::Store(panel.offsets[sub], scales.Offset(i));
      }
      for (int line = 0; line < W::kPanelStepBytes; line += 64) __builtin_prefetch(w + kTilePrefetchBytes + line);
      for (int i = 0; i < kLayout.blocks; ++i, codes += kBlockK * kBlockColumns) {
        UnpackBlock(w + i * kLayout.CodeBytes(), codes);
      }
    }
  }

  // Adds the products of a block of steps to 16 rows of y.
  static void AddTile(const MultiplyTask& task, int64_t p, int64_t block, int64_t row, const Panel& panel) noexcept {
    const int64_t column = p * kPanelColumns, left = task.rows - row;
    const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
    const int columns = task.out - column < kPanelColumns ? static_cast<int>(task.out - column) : kPanelColumns;
    float* y = task.y + row * task.y_stride + column;
    Vec16::F sums[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      sums[r] = block == 0 || r >= rows ? Vec16::Zero() : Vec16::LoadTail(y + r * task.y_stride, columns);
    }
    const uint8_t* x = task.x + (block * task.rows + row) * kXStride<W>;
    const uint8_t* codes = panel.codes;
    for (int i = 0; i < panel.blocks; ++i, x += sizeof(Block), codes += kBlockK * kBlockColumns) {
      AddSub<0>(x, codes, panel, i, sums);
      if constexpr (kSubs == 2) AddSub<1>(x, codes, panel, i, sums);
    }
    const bool last = block + 1 == task.steps.blocks;
    Vec16::F bias = Vec16::Zero();
    if (last && task.bias != nullptr) bias = Vec16::LoadTail(task.bias + column, columns);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      if (r >= rows) break;
      const Vec16::F sum = last && task.bias != nullptr ? Vec16::Add(sums[r], bias) : sums[r];
      Vec16::StoreTail(y + r * task.y_stride, sum, columns);
    }
  }

  template <int kSub>
  static KVANTA_INLINE void AddSub(const uint8_t* x, const uint8_t* codes, const Panel& panel, int block,
                                   Vec16::F* sums) {
    alignas(64) int32_t dots[kTileRows][kPanelColumns];
    alignas(64) int32_t low[kIsWide ? kTileRows : 1][kPanelColumns];
    const uint8_t* sub_codes = x + kSub * kLayout.sub;
    Tiles::Load<kWeights>(codes + kSub * kSubCodeBytes, 64);
    Dot<kSums>(sub_codes, dots[0]);
    if constexpr (kIsWide) Dot<kLowSums>(sub_codes + kBlockK, low[0]);
    const int sub = block * kSubs + kSub;
    const Vec16::F scale = Vec16::Load(panel.scales[sub]);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      const Block& of_x = *reinterpret_cast<const Block*>(x + row * kXStride<W>);
      Vec16::I dot = _mm512_load_si512(dots[row]);
      if constexpr (kIsWide) dot = Vec16::CombineTerms(dot, _mm512_load_si512(low[row]));
      sums[row] = Vec16::Fma(Vec16::FromInt(dot), Vec16::Mul(scale, Vec16::Set1(of_x.scale)), sums[row]);
    }
    if constexpr (kLayout.has_offset) {
      const Vec16::F offset = Vec16::Load(panel.offsets[sub]);
#pragma GCC unroll 16
      for (int row = 0; row < kTileRows; ++row) {
        const Block& of_x = *reinterpret_cast<const Block*>(x + row * kXStride<W>);
        sums[row] = Vec16::Fma(offset, Vec16::Set1(of_x.scaled_sum[kSub]), sums[row]);
      }
    }
  }

  template <int kSum>
  static KVANTA_INLINE void Dot(const uint8_t* codes, int32_t* dots) {
    Tiles::Zero<kSum>();
    Tiles::Load<kX>(codes, kXStride<W>);
    Tiles::DotSignedSigned<kSum, kX, kWeights>();
    Tiles::Store<kSum>(reinterpret_cast<uint8_t*>(dots), 64);
  }
};

template <int kStorage = 0>
void SetBlockTiles(BlockKernels& kernels) {
  if constexpr (kStorage < kBlockStorages) {
    for (const bool wide : {false, true}) {
      WeightKernels& of = kernels.of[kStorage][wide ? 1 : 0];
      of.multiply = wide ? BlockTiles<kBlockLayouts[kStorage], true>::Multiply
                         : BlockTiles<kBlockLayouts[kStorage], false>::Multiply;
      of.block_rows = kTiledRows;
    }
    SetBlockTiles<kStorage + 1>(kernels);
  }
}

}  // namespace
}  // namespace kvanta::kernels
