// Storages of W for the matrix kernels: packing of a step of x, loading of a step of a panel, and their multiply-add,
// over the Vec16 of the including ISA unit.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Rounds to the nearest bf16, ties to even; NaN stays a quiet NaN. A copy of base/dtype.h's function without external
// linkage.
KVANTA_INLINE uint32_t RoundToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40U;
  return (bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded;
}

// Weights stored as elements; a block of steps is 16 KiB of a panel (bf16 in two phases: 32 KiB).
struct ElementTile {
  static constexpr bool kIsBlock = false;
  static constexpr int kBlockSteps = 256;
  static constexpr int kRowTile = Vec16::kRowTile;
  static constexpr int kTileSums = Vec16::kTileSums;
  static constexpr int kColumnTile = Vec16::kColumnTile;
  static constexpr int64_t kPrefetchBytes = 8192;  // ahead, of all panels together: must cover memory's latency
};

struct Bf16Weight : ElementTile {
  using X = Vec16::Bf16X;
  static constexpr int kStepK = 2;
  static constexpr int kPhases = Vec16::kBf16Phases;
  // Two phases: blocks of twice as many steps load and store sums half as often, 3 % of the time on Emerald Rapids.
  static constexpr int kBlockSteps = 256 * kPhases;
  static constexpr int kPanelStepBytes = 64;
  template <int kPhase>
  static KVANTA_INLINE Vec16::Bf16W LoadW(const uint8_t* p) {
    return Vec16::LoadBf16Block<kPhase>(reinterpret_cast<const uint16_t*>(p));
  }
  static KVANTA_INLINE auto SetX(const X* x) { return Vec16::BroadcastBf16(x); }
  template <class XLanes>
  static KVANTA_INLINE Vec16::F Dot(XLanes x, Vec16::Bf16W w, Vec16::F sum) {
    return Vec16::DotBf16(x, w, sum);
  }
  // Packs k values to whole steps; the last odd one is paired with zero.
  static KVANTA_INLINE void PackRow(const float* x, int64_t k, X* out) {
    if constexpr (kPhases == 2) {  // rounded, but stored as f32
      for (int64_t i = 0; i < k; ++i) {
        const uint32_t bits = RoundToBf16(x[i]) << 16;
        std::memcpy(&out[i], &bits, sizeof bits);
      }
      if (k % 2 != 0) out[k] = X{0};
    } else {  // pairs of codes
      auto* codes = reinterpret_cast<uint16_t*>(out);
      for (int64_t i = 0; i < k; ++i) codes[i] = static_cast<uint16_t>(RoundToBf16(x[i]));
      if (k % 2 != 0) codes[k] = 0;
    }
  }
};

// x in f32, one k per step.
struct F32X : ElementTile {
  using X = float;
  static constexpr int kStepK = 1;
  static constexpr int kPhases = 1;
  static KVANTA_INLINE Vec16::F SetX(const float* x) { return Vec16::Set1(*x); }
  static KVANTA_INLINE Vec16::F Dot(Vec16::F x, Vec16::F w, Vec16::F sum) { return Vec16::Fma(x, w, sum); }
  static KVANTA_INLINE void PackRow(const float* x, int64_t k, float* out) {
    std::memcpy(out, x, static_cast<size_t>(k) * sizeof(float));
  }
};

struct F32Weight : F32X {
  static constexpr int kPanelStepBytes = 64;
  template <int>
  static KVANTA_INLINE Vec16::F LoadW(const uint8_t* p) {
    return Vec16::Load(reinterpret_cast<const float*>(p));
  }
};

struct F16Weight : F32X {
  static constexpr int kPanelStepBytes = 32;
  template <int>
  static KVANTA_INLINE Vec16::F LoadW(const uint8_t* p) {
    return Vec16::LoadFp16(reinterpret_cast<const uint16_t*>(p));
  }
};

}  // namespace
}  // namespace kvanta::kernels
