// W in blocks of 32 k (kernels/linear/weight_blocks.h) for the matrix kernels, over the Vec16 and block dots of the
// including ISA unit. A step is a block of 16 columns:
//
//   codes, unsigned (+ 8 or + 128 where there is no offset):
//     8 bits: [8 quads of k][16 columns][4 k]
//     4 bits: [4 pairs of quads][16 columns][4 k], the first quad of a pair in the low halves of the bytes
//   fp16 scales [16] | fp16 offsets [16] where there are any
//
// x is quantized to 127 steps of the maximum of its block, or to 32,512 (wide), to the same codes on every ISA. With s
// the scale of x's block:
// y += (scale * s) * (exact dot) + offset * (s * sum of x's codes), blocks in ascending order.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/activation_codes.h"
#include "kernels/linear/cpu/table.h"

namespace kvanta::kernels {
namespace {

// A block of x with a smaller maximum counts as zero: the inverse would overflow.
constexpr float kMinMaxOfX = 0x1p-100f;

template <class Dots, int kBits, bool kHasOffset, bool kIsWide>
struct BlockWeight {
  struct X {
    typename Dots::X codes;
    float scale;
    int32_t start;  // compensates for the offset of W's codes
    float scaled_sum;
  };
  static constexpr bool kIsBlock = true;
  static constexpr int kStepK = 32;
  static constexpr int kPhases = 1;
  static constexpr int kCodeBytes = kPanelColumns * kStepK * kBits / 8;
  static constexpr int kPanelStepBytes = kCodeBytes + 2 * kPanelColumns * (kHasOffset ? 2 : 1);
  static constexpr int kBlockSteps = 32;
  static constexpr int kRowTile = kBlockRowTile;
  static constexpr int kTileSums = kBlockRowTile;
  static constexpr int kColumnTile = 1;
  static constexpr int64_t kPrefetchBytes = 3072;  // a single stream: it alone must cover the latency of memory
  static constexpr float kStepsOfX = kIsWide ? 32512 : 127;
  static constexpr int32_t kCodeOffset = kHasOffset ? 0 : 1 << (kBits - 1);

  // x: rows `x_stride` bytes apart, at the step; w: the panel, at the step.
  template <int kRows>
  static KVANTA_INLINE void AddStep(const uint8_t* x, int64_t x_stride, const uint8_t* w, Vec16::F (*sums)[1]) {
    Vec16::I dots[kRows];
    Dots::template Dot<kRows>(w, x, x_stride, dots);
    const auto* scales = reinterpret_cast<const uint16_t*>(w + kCodeBytes);
    const Vec16::F scale = Vec16::LoadFp16(scales);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const X& block = *reinterpret_cast<const X*>(x + row * x_stride);
      const Vec16::I dot = kHasOffset ? dots[row] : Vec16::AddInt(dots[row], block.start);
      sums[row][0] = Vec16::Fma(Vec16::FromInt(dot), Vec16::Mul(scale, Vec16::Set1(block.scale)), sums[row][0]);
    }
    if constexpr (kHasOffset) {
      const Vec16::F offset = Vec16::LoadFp16(scales + kPanelColumns);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const X& block = *reinterpret_cast<const X*>(x + row * x_stride);
        sums[row][0] = Vec16::Fma(offset, Vec16::Set1(block.scaled_sum), sums[row][0]);
      }
    }
  }

  static KVANTA_INLINE void PackRow(const float* x, int64_t k, X* out) {
    for (; k >= kStepK; k -= kStepK, x += kStepK) PackBlock(x, *out++);
    if (k == 0) return;
    float rest[kStepK] = {};
    std::memcpy(rest, x, static_cast<size_t>(k) * sizeof(float));
    PackBlock(rest, *out);
  }

 private:
  static KVANTA_INLINE void PackBlock(const float* x, X& out) {
    const Vec16::F a = Vec16::Load(x), b = Vec16::Load(x + Vec16::kLanes), zero = Vec16::Zero();
    const float largest =
        Vec16::MaxOf(Vec16::Max(Vec16::Max(a, Vec16::Sub(zero, a)), Vec16::Max(b, Vec16::Sub(zero, b))));
    // NaN unless all are finite.
    const float check = Vec16::Sum(Vec16::Mul(Vec16::Add(Vec16::Mul(a, zero), Vec16::Mul(b, zero)), zero));
    const bool counts = check == 0 && largest >= kMinMaxOfX;
    float steps[kStepK] = {};
    if (counts) {
      const Vec16::F inverse = Vec16::Set1(kStepsOfX / largest);
      Vec16::Store(steps, Vec16::Round(Vec16::Mul(a, inverse)));
      Vec16::Store(steps + Vec16::kLanes, Vec16::Round(Vec16::Mul(b, inverse)));
    }
    int32_t codes[kStepK];
    int32_t sum = 0;
    for (int i = 0; i < kStepK; ++i) {
      codes[i] = static_cast<int32_t>(steps[i]);
      sum += codes[i];
    }
    Dots::Store(codes, out.codes);
    out.scale = counts ? largest / kStepsOfX : check;
    out.start = -kCodeOffset * sum;
    out.scaled_sum = out.scale * static_cast<float>(sum);
  }
};

using Int8Weight = BlockWeight<Int8Dot, 8, false, false>;
using Int8WideWeight = BlockWeight<Int8WideDot, 8, false, true>;
using Int4Weight = BlockWeight<Int4Dot, 4, false, false>;
using Int4WideWeight = BlockWeight<TwoTermDot<Int4Dot>, 4, false, true>;
using Int4OffsetWeight = BlockWeight<Int4Dot, 4, true, false>;
using Int4OffsetWideWeight = BlockWeight<TwoTermDot<Int4Dot>, 4, true, true>;

}  // namespace
}  // namespace kvanta::kernels
