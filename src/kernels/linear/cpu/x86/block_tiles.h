// Matrix products of weights in blocks by AMX tiles, for many rows. Packed x and panels are those of the AVX-512 unit,
// and so are the bits of the results: dots are exact, and everything else is in the same order.
#pragma once

#include <algorithm>
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

// True if dots of vectors are faster: a tile of a few rows takes as long as one of 16. Measured with Q4_K on Emerald
// Rapids.
constexpr bool VectorsAreFaster(int64_t rows) noexcept {
  return rows <= 12 || (rows > 16 && rows <= 22);
}
// With more rows, the prefetches of Unpack suffice.
inline constexpr int64_t kPrefetchingRows = 48;
// Prefetch distance in a panel, likewise.
inline constexpr int64_t kTilePrefetchBytes = 4096;
// Rows of x that are packed at a time: whole tiles, of which the last one may read rows that do not exist.
inline constexpr int64_t kTiledRows = 128;

// kFormat: an index of BlockKernels::of.
template <int kFormat, bool kIsWide>
class BlockTiles {
 public:
  static void Multiply(const MultiplyTask& task) noexcept {
    // By the AVX-512 unit: Multiply<W>() would be compiled a second time here.
    if (VectorsAreFaster(task.rows)) return Avx512LinearKernels().blocks->of[kFormat][kIsWide ? 1 : 0].multiply(task);
    Tiles::Configure(Shapes());
    Panel panel;
    for (int64_t block = 0; block < task.steps.blocks; ++block) {
      for (int64_t p = task.first_panel; p < task.end_panel; ++p) {
        Unpack(task, p, block, panel);
        Prefetch prefetch = task.rows <= kPrefetchingRows ? NextPanel(task, p, block) : Prefetch();
        for (int64_t row = 0; row < task.rows; row += kTileRows) AddTile(task, p, block, row, panel, prefetch);
      }
    }
    Tiles::Release();
  }

 private:
  static constexpr BlockLayout kLayout = kBlockLayouts[kFormat];
  using W = BlockWeight<kLayout, kIsWide>;
  using Block = typename W::Block;
  static constexpr int kSubs = kLayout.Subs();
  static constexpr int kMaxBlocks = W::kBlockSteps * kLayout.blocks;
  static constexpr int kSubCodeBytes = kLayout.sub * kPanelColumns;

  // Dots in flight, each in a tile register, or in two: of the high terms and of the low ones. Whole blocks.
  static constexpr int kBatch = kIsWide ? kTilesUnroll / 2 : kTilesUnroll;

  // A block of steps of a panel, unpacked: second operands of products, and the scales.
  struct Panel {
    alignas(64) uint8_t codes[kMaxBlocks * kBlockK * kPanelColumns];
    alignas(64) float scales[kMaxBlocks * kSubs][kPanelColumns];
    alignas(64) float offsets[kLayout.has_offset ? kMaxBlocks * kSubs : 1][kPanelColumns];
    int blocks = 0;
  };

  // Lines of the panel that is unpacked next, which come from memory while the tiles of this one are computed.
  struct Prefetch {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    int64_t bytes = 0;  // with each batch of dots

    KVANTA_INLINE void Some() {
      for (int64_t byte = 0; byte < bytes && at < end; byte += 64, at += 64) __builtin_prefetch(at, 0, 2);
    }
  };

  static Prefetch NextPanel(const MultiplyTask& task, int64_t p, int64_t block) noexcept {
    const bool same_block = p + 1 < task.end_panel;
    if (!same_block && ++block == task.steps.blocks) return {};
    const int64_t first = task.steps.First(block), steps = task.steps.First(block + 1) - first;
    const uint8_t* w =
        task.w + ((same_block ? p + 1 : task.first_panel) * task.steps.steps + first) * W::kPanelStepBytes;
    const int64_t batches = CeilDiv(task.rows, kTileRows) * (steps * kLayout.blocks * kSubs / kBatch);
    const int64_t lines = CeilDiv(steps * W::kPanelStepBytes / 64, std::max<int64_t>(batches, 1));
    return {.at = w, .end = w + steps * W::kPanelStepBytes, .bytes = lines * 64};
  }

  static constexpr TileShapes Shapes() {
    TileShapes shapes;
    for (int i = 0; i < 2; ++i) {
      shapes.row_bytes[kFirstOperand + i] = kLayout.sub;
      shapes.rows[kSecondOperand + i] = kLayout.sub / 4;
    }
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
      if (task.rows > kPrefetchingRows) {
        for (int line = 0; line < W::kPanelStepBytes; line += 64) __builtin_prefetch(w + kTilePrefetchBytes + line);
      }
      for (int i = 0; i < kLayout.blocks; ++i, codes += kBlockK * kPanelColumns) {
        UnpackBlock(w + i * kLayout.CodeBytes(), codes);
      }
    }
  }

  // Adds the products of a block of steps to 16 rows of y.
  static void AddTile(const MultiplyTask& task, int64_t p, int64_t block, int64_t row, const Panel& panel,
                      Prefetch& prefetch) noexcept {
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
    const int subs = panel.blocks * kSubs;
    int sub = 0;
    for (; sub + kBatch <= subs; sub += kBatch) {
      prefetch.Some();
      AddSubs<kBatch>(x, panel, sub, sums);
    }
    for (; sub < subs; sub += kSubs) AddSubs<kSubs>(x, panel, sub, sums);
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

  // Codes of sub-block `sub` of the first row of x, and its block.
  static KVANTA_INLINE const uint8_t* XCodes(const uint8_t* x, int sub) {
    return x + sub / kSubs * static_cast<int64_t>(sizeof(Block)) + sub % kSubs * kLayout.sub;
  }
  static KVANTA_INLINE const Block& XBlock(const uint8_t* x, int sub, int row) {
    return *reinterpret_cast<const Block*>(x + sub / kSubs * static_cast<int64_t>(sizeof(Block)) + row * kXStride<W>);
  }

  // Adds the products of kCount sub-blocks from `first` on. All dots are started before the first one is needed.
  template <int kCount>
  static KVANTA_INLINE void AddSubs(const uint8_t* x, const Panel& panel, int first, Vec16::F* sums) {
    alignas(64) int32_t dots[kCount][kTileRows][kPanelColumns];
    alignas(64) int32_t low[kIsWide ? kCount : 1][kTileRows][kPanelColumns];
    ForTiles<kCount>([&](auto index) __attribute__((always_inline)) {
      constexpr int kIndex = decltype(index)::kValue, kWeights = kSecondOperand + kIndex % 2;
      const uint8_t* codes = XCodes(x, first + kIndex);
      Tiles::Load<kWeights>(panel.codes + (first + kIndex) * kSubCodeBytes, 64);
      Dot<kIndex, kWeights, kFirstOperand + kIndex % 2>(codes);
      if constexpr (kIsWide) Dot<kBatch + kIndex, kWeights, kFirstOperand + kIndex % 2>(codes + kBlockK);
    });
    ForTiles<kCount>([&](auto index) __attribute__((always_inline)) {
      constexpr int kIndex = decltype(index)::kValue;
      Tiles::Store<kIndex>(reinterpret_cast<uint8_t*>(dots[kIndex][0]), 64);
      if constexpr (kIsWide) Tiles::Store<kBatch + kIndex>(reinterpret_cast<uint8_t*>(low[kIndex][0]), 64);
    });
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i += kSubs) AddBlock(x, panel, first + i, dots + i, low + (kIsWide ? i : 0), sums);
  }

  // Adds the block whose first sub-block is `first`, as BlockWeight does.
  static KVANTA_INLINE void AddBlock(const uint8_t* x, const Panel& panel, int first,
                                     const int32_t (*dots)[kTileRows][kPanelColumns],
                                     const int32_t (*low)[kTileRows][kPanelColumns], Vec16::F* sums) {
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      const Block& block = XBlock(x, first, row);
      Vec16::F total;
#pragma GCC unroll 2
      for (int sub = 0; sub < kSubs; ++sub) {
        Vec16::I dot = _mm512_load_si512(dots[sub][row]);
        if constexpr (kIsWide) dot = Vec16::CombineTerms(dot, _mm512_load_si512(low[sub][row]));
        const Vec16::F scale = Vec16::Load(panel.scales[first + sub]);
        total = sub == 0 ? Vec16::Mul(Vec16::FromInt(dot), scale) : Vec16::Fma(Vec16::FromInt(dot), scale, total);
      }
      if constexpr (kLayout.has_offset) {
#pragma GCC unroll 2
        for (int sub = 0; sub < kSubs; ++sub) {
          total = Vec16::Fma(Vec16::Load(panel.offsets[first + sub]), Vec16::Set1(block.sums[sub]), total);
        }
      }
      sums[row] = Vec16::Fma(total, Vec16::Set1(block.scale), sums[row]);
    }
  }

  template <int kSum, int kWeights, int kX>
  static KVANTA_INLINE void Dot(const uint8_t* codes) {
    Tiles::Zero<kSum>();
    Tiles::Load<kX>(codes, kXStride<W>);
    Tiles::DotSignedSigned<kSum, kX, kWeights>();
  }
};

// Puts tiles into a copy of the AVX-512 unit's kernels.
template <int kFormat = 1>
void SetBlockTiles(BlockKernels& kernels) {
  if constexpr (kFormat < weights::kBlockFormats) {
    for (const bool wide : {false, true}) {
      WeightKernels& of = kernels.of[kFormat][wide ? 1 : 0];
      of.multiply = wide ? BlockTiles<kFormat, true>::Multiply : BlockTiles<kFormat, false>::Multiply;
      of.block_rows = kTiledRows;
    }
    SetBlockTiles<kFormat + 1>(kernels);
  }
}

}  // namespace
}  // namespace kvanta::kernels
