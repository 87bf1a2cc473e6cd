// W in blocks of 32 k for the matrix kernels, over the Vec16 and the dots of blocks (BlockDots) of the including ISA
// unit. block_layout.h describes the panels.
//
// x is quantized to 127 steps of the maximum of its block, or to 32,512 (wide), to the same codes on every ISA. For
// each block in ascending order, t is the sum over its sub-blocks of (scale * sub_scale) * (exact dot), then of (offset
// * sub_offset) * (sum of x's codes), and y += t * (scale of x's block).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/block_layout.h"
#include "kernels/linear/cpu/table.h"

namespace kvanta::kernels {
namespace {

// A block of x with a smaller maximum counts as zero: the inverse would overflow.
constexpr float kMinMaxOfX = 0x1p-100f;

// Scales of a step of a panel.
template <BlockLayout kLayout>
struct StepScales {
  Vec16::F scale, offset;
  const uint8_t* sub_scales = nullptr;

  StepScales() = default;
  explicit KVANTA_INLINE StepScales(const uint8_t* step) : scale(Read(step + kLayout.Scales())), offset(Vec16::Zero()) {
    if constexpr (kLayout.has_offset) offset = Read(step + kLayout.Offsets());
    sub_scales = step + kLayout.SubScales();
  }

  // `sub`: index of the sub-block in the step.
  KVANTA_INLINE Vec16::F Scale(int sub) const {
    const uint8_t* at = sub_scales + sub * kPanelColumns;
    if constexpr (kLayout.sub_scale == SubScaleType::kNone) return scale;
    if constexpr (kLayout.sub_scale == SubScaleType::kInt8) return Vec16::Mul(scale, Vec16::LoadInt8(at));
    if constexpr (kLayout.sub_scale == SubScaleType::kUint8) return Vec16::Mul(scale, Vec16::LoadUint8(at));
    if constexpr (kLayout.sub_scale == SubScaleType::kTwoUint4)
      return Vec16::Mul(scale, Vec16::FromInt(Vec16::AndInt(Vec16::LoadBytes(at), 15)));
    if constexpr (kLayout.sub_scale == SubScaleType::kE4M3) return Vec16::Mul(scale, Vec16::LoadE4M3(at));
  }
  KVANTA_INLINE Vec16::F Offset(int sub) const {
    const uint8_t* at = sub_scales + sub * kPanelColumns;
    if constexpr (kLayout.sub_scale == SubScaleType::kUint8)
      return Vec16::Mul(offset, Vec16::LoadUint8(at + kLayout.SubOffsets() - kLayout.SubScales()));
    if constexpr (kLayout.sub_scale == SubScaleType::kTwoUint4)
      return Vec16::Mul(offset, Vec16::FromInt(Vec16::RightInt(Vec16::LoadBytes(at), 4)));
    return offset;
  }

 private:
  static KVANTA_INLINE Vec16::F Read(const uint8_t* at) {
    if constexpr (kLayout.scale == ScaleType::kFp16) return Vec16::LoadFp16(reinterpret_cast<const uint16_t*>(at));
    if constexpr (kLayout.scale == ScaleType::kF32) return Vec16::Load(reinterpret_cast<const float*>(at));
    // The values that codes stand for are doubled.
    if constexpr (kLayout.scale == ScaleType::kE8M0) return Vec16::Mul(Vec16::LoadE8M0(at), Vec16::Set1(0.5f));
  }
};

template <BlockLayout kLayout, bool kIsWide>
struct BlockWeight {
  using Dots = BlockDots<kLayout, kIsWide>;
  static constexpr int kSubs = kLayout.Subs();
  struct Block {
    typename Dots::X codes;
    float scale;
    int32_t start[kSubs];  // initial value of a dot: compensates for the offset of W's codes
    float sums[kSubs];     // sums of the codes
  };
  struct X {
    Block blocks[kLayout.blocks];
  };
  static constexpr bool kIsBlock = true;
  // Storage that tiles of very many rows read: a copy in the cache, or this one.
  using Expanded = BlockWeight<Dots::kExpands ? ExpandedOf(kLayout) : kLayout, kIsWide>;
  static constexpr int kStepK = kLayout.StepK();
  static constexpr int kPhases = 1;
  static constexpr int kPanelStepBytes = kLayout.StepBytes();
  static constexpr int kBlockSteps = 32 / kLayout.blocks;
  static constexpr int kRowTile = Dots::kRowTile;
  static constexpr int kTileSums = Dots::kRowTile * Dots::kPanels;
  static constexpr int kColumnTile = Dots::kPanels;
  static constexpr int64_t kPrefetchBytes = 0;  // AddStep prefetches: a whole step at once would fill the buffers
  static constexpr float kStepsOfX = kIsWide ? 32512 : 127;
  static constexpr int64_t kAhead = 6144;  // prefetch distance in bytes: a single stream must cover memory's latency
  static constexpr int kAheadBytes = kPanelStepBytes / kLayout.blocks;  // prefetched with each block

  // x: rows `x_stride` bytes apart, at the step; w: the panels, `w_panel` bytes apart, at the step.
  template <int kRows, int kPanels>
  static KVANTA_INLINE void AddStep(const uint8_t* x, int64_t x_stride, const uint8_t* w, int64_t w_panel,
                                    Vec16::F (*sums)[kPanels]) {
    StepScales<kLayout> scales[kPanels];
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) scales[panel] = StepScales<kLayout>(w + panel * w_panel);
    const uint8_t* ahead = w + kAhead;
#pragma GCC unroll 1
    for (int block = 0; block < kLayout.blocks; ++block) {
#pragma GCC unroll 4
      for (int panel = 0; panel < (kLayout.is_expanded ? 0 : kPanels); ++panel) {
#pragma GCC unroll 16
        for (int line = 0; line < kAheadBytes; line += 64) __builtin_prefetch(ahead + panel * w_panel + line);
      }
      ahead += kAheadBytes;
      AddBlock<kRows, kPanels>(x, x_stride, w, w_panel, scales, block, sums);
      x += sizeof(Block);
      w += kLayout.CodeBytes();
    }
  }

  // Copies a step of a panel to one of the expanded layout.
  static void ExpandStep(const uint8_t* w, uint8_t* out) {
    constexpr BlockLayout kExpanded = ExpandedOf(kLayout);
    for (int block = 0; block < kLayout.blocks; ++block) {
      Dots::Expand(w + block * kLayout.CodeBytes(), out + block * kExpanded.CodeBytes());
    }
    std::memcpy(out + kExpanded.Scales(), w + kLayout.Scales(), kLayout.StepBytes() - kLayout.Scales());
  }

  static KVANTA_INLINE void PackRow(const float* x, int64_t k, X* out) {
    Block* block = out->blocks;
    for (; k >= kBlockK; k -= kBlockK, x += kBlockK) PackBlock(x, *block++);
    float rest[kBlockK] = {};
    if (k != 0) {
      std::memcpy(rest, x, static_cast<size_t>(k) * sizeof(float));
      PackBlock(rest, *block++);
      std::memset(rest, 0, sizeof rest);
    }
    while ((block - out->blocks) % kLayout.blocks != 0) PackBlock(rest, *block++);
  }

 private:
  static KVANTA_INLINE const Block& BlockOf(const uint8_t* x, int64_t x_stride, int row) {
    return *reinterpret_cast<const Block*>(x + row * x_stride);
  }

  template <int kRows, int kPanels>
  static KVANTA_INLINE void AddBlock(const uint8_t* x, int64_t x_stride, const uint8_t* w, int64_t w_panel,
                                     const StepScales<kLayout>* scales, int block_index, Vec16::F (*sums)[kPanels]) {
    Vec16::F totals[kRows][kPanels];
    AddSub<kRows, kPanels, 0>(x, x_stride, w, w_panel, scales, block_index * kSubs, totals);
    if constexpr (kSubs == 2) {
      AddSub<kRows, kPanels, 1>(x, x_stride, w, w_panel, scales, block_index * kSubs + 1, totals);
    }
#pragma GCC unroll 2
    for (int sub = 0; sub < (kLayout.has_offset ? kSubs : 0); ++sub) {
      Vec16::F offsets[kPanels];
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel) offsets[panel] = scales[panel].Offset(block_index * kSubs + sub);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const Vec16::F sum = Vec16::Set1(BlockOf(x, x_stride, row).sums[sub]);
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel) {
          totals[row][panel] = Vec16::Fma(offsets[panel], sum, totals[row][panel]);
        }
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Vec16::F scale = Vec16::Set1(BlockOf(x, x_stride, row).scale);
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel) {
        sums[row][panel] = Vec16::Fma(totals[row][panel], scale, sums[row][panel]);
      }
    }
  }

  // sub_index: of the sub-block, in the step.
  template <int kRows, int kPanels, int kSub>
  static KVANTA_INLINE void AddSub(const uint8_t* x, int64_t x_stride, const uint8_t* w, int64_t w_panel,
                                   const StepScales<kLayout>* scales, int sub_index, Vec16::F (*totals)[kPanels]) {
    Vec16::I dots[kRows][kPanels];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel) {
        dots[row][panel] = Vec16::SetInt(kLayout.code_offset == 0 ? 0 : BlockOf(x, x_stride, row).start[kSub]);
      }
    }
    if constexpr (kPanels == 1) {
      Dots::template AddDots<kRows, kSub>(w, x, x_stride, dots[0]);
    } else {
      Dots::template AddPanelDots<kRows, kPanels, kSub>(w, w_panel, x, x_stride, dots[0]);
    }
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) {
      const Vec16::F scale = scales[panel].Scale(sub_index);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const Vec16::F dot = Vec16::FromInt(dots[row][panel]);
        totals[row][panel] = kSub == 0 ? Vec16::Mul(dot, scale) : Vec16::Fma(dot, scale, totals[row][panel]);
      }
    }
  }

  static KVANTA_INLINE void PackBlock(const float* x, Block& out) {
    const Vec16::F a = Vec16::Load(x), b = Vec16::Load(x + Vec16::kLanes), zero = Vec16::Zero();
    const float largest =
        Vec16::MaxOf(Vec16::Max(Vec16::Max(a, Vec16::Sub(zero, a)), Vec16::Max(b, Vec16::Sub(zero, b))));
    // NaN unless all are finite.
    const float check = Vec16::Sum(Vec16::Mul(Vec16::Add(Vec16::Mul(a, zero), Vec16::Mul(b, zero)), zero));
    const bool counts = check == 0 && largest >= kMinMaxOfX;
    float steps[kBlockK] = {};
    if (counts) {
      const Vec16::F inverse = Vec16::Set1(kStepsOfX / largest);
      Vec16::Store(steps, Vec16::Round(Vec16::Mul(a, inverse)));
      Vec16::Store(steps + Vec16::kLanes, Vec16::Round(Vec16::Mul(b, inverse)));
    }
    out.scale = counts ? largest / kStepsOfX : check;
    int32_t codes[kBlockK];
    for (int sub = 0; sub < kSubs; ++sub) {
      int32_t sum = 0;
      for (int i = sub * kLayout.sub; i < (sub + 1) * kLayout.sub; ++i) {
        codes[i] = static_cast<int32_t>(steps[i]);
        sum += codes[i];
      }
      out.start[sub] = -kLayout.code_offset * sum;
      out.sums[sub] = static_cast<float>(sum);
    }
    Dots::Store(codes, out.codes);
  }
};

}  // namespace
}  // namespace kvanta::kernels
