// Layout of packed quantized weights (kernels/linear/quantized_weight.h), and their decoding to f32, over the Vec16 of
// the including ISA unit. A step is 128 k of 16 columns:
//
//   codes: 8 bits: [128 k][16 columns]; 4 bits: [64 pairs of k][16 columns], the even k in the low halves of the bytes
//   scales of the groups [128 / group][16]: f32, or bytes (E8M0, E4M3)
//   kInt4: zero points of the groups [128 / group][16], bytes
//   kE4M3 scales: scale of the weight, f32 [16]
//
// Codes are decoded exactly.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/table.h"
#include "weights/four_bit_values.h"

namespace kvanta::kernels {
namespace {

// Decoders of the codes of a pair of k, 16 columns each. `zero`: zero points of the columns.
struct E4m3Codes {
  static constexpr int kPairBytes = 32;
  static constexpr bool kHasZeros = false;
  KVANTA_INLINE void Load(const uint8_t* p, Vec16::F /*zero*/, Vec16::F& even, Vec16::F& odd) const {
    Vec16::LoadE4M3Pair(p, even, odd);  // times 2^-8, which the stored scales compensate for
  }
};

struct Int8Codes {
  static constexpr int kPairBytes = 32;
  static constexpr bool kHasZeros = false;
  KVANTA_INLINE void Load(const uint8_t* p, Vec16::F /*zero*/, Vec16::F& even, Vec16::F& odd) const {
    even = Vec16::LoadInt8(p);
    odd = Vec16::LoadInt8(p + 16);
  }
};

struct Int4Codes {
  static constexpr int kPairBytes = 16;
  static constexpr bool kHasZeros = true;
  KVANTA_INLINE void Load(const uint8_t* p, Vec16::F zero, Vec16::F& even, Vec16::F& odd) const {
    Vec16::LoadNibbles(p, even, odd);
    even = Vec16::Sub(even, zero);
    odd = Vec16::Sub(odd, zero);
  }
};

// Copies without external linkage.
constexpr weights::FourBitValues kNf4Table = weights::kNf4Values, kFp4Table = weights::kFp4Values;

template <const weights::FourBitValues& kTable>
struct LookupCodes {
  static constexpr int kPairBytes = 16;
  static constexpr bool kHasZeros = false;
  Vec16::F table = Vec16::Load(kTable.of);

  KVANTA_INLINE void Load(const uint8_t* p, Vec16::F /*zero*/, Vec16::F& even, Vec16::F& odd) const {
    Vec16::LookupNibbles(p, table, even, odd);
  }
};

// Storages of the scales of a group's 16 columns.
struct F32Scales {
  static constexpr int kBytes = 64;
  static constexpr bool kHasTensorScale = false;
  static KVANTA_INLINE Vec16::F Load(const uint8_t* p) { return Vec16::Load(reinterpret_cast<const float*>(p)); }
};
struct E8m0Scales {
  static constexpr int kBytes = 16;
  static constexpr bool kHasTensorScale = false;
  static KVANTA_INLINE Vec16::F Load(const uint8_t* p) { return Vec16::LoadE8M0(p); }
};
struct E4m3Scales {
  static constexpr int kBytes = 16;
  static constexpr bool kHasTensorScale = true;
  static KVANTA_INLINE Vec16::F Load(const uint8_t* p) { return Vec16::LoadE4M3(p); }
};

template <class CodesOfWeight, class Scales, int kGroupSize>
struct QuantizedLayout {
  using Codes = CodesOfWeight;
  static constexpr int kStepK = 128;
  static constexpr int kGroup = kGroupSize;
  static constexpr int kGroups = kStepK / kGroup;
  static constexpr int kCodeBytes = kStepK / 2 * Codes::kPairBytes;
  static constexpr int kZerosAt = kCodeBytes + kGroups * Scales::kBytes;
  static constexpr int kTensorScaleAt = kZerosAt + (Codes::kHasZeros ? kGroups * kPanelColumns : 0);
  static constexpr int kPanelStepBytes = kTensorScaleAt + (Scales::kHasTensorScale ? 64 : 0);

  // w: the panel, at the step.
  static KVANTA_INLINE Vec16::F Scale(const uint8_t* w, int group) {
    const Vec16::F scale = Scales::Load(w + kCodeBytes + group * Scales::kBytes);
    if constexpr (!Scales::kHasTensorScale) return scale;
    return Vec16::Mul(scale, Vec16::Load(reinterpret_cast<const float*>(w + kTensorScaleAt)));
  }
  static KVANTA_INLINE Vec16::F Zero(const uint8_t* w, int group) {
    if constexpr (!Codes::kHasZeros) return Vec16::Zero();
    return Vec16::LoadUint8(w + kZerosAt + group * kPanelColumns);
  }
};

using E4m3Layout = QuantizedLayout<E4m3Codes, F32Scales, 128>;
template <int kGroup>
using Int8Layout = QuantizedLayout<Int8Codes, F32Scales, kGroup>;
template <int kGroup>
using Int4Layout = QuantizedLayout<Int4Codes, F32Scales, kGroup>;
using Nf4Layout = QuantizedLayout<LookupCodes<kNf4Table>, F32Scales, 64>;
using Mxfp4Layout = QuantizedLayout<LookupCodes<kFp4Table>, E8m0Scales, 32>;
using Nvfp4Layout = QuantizedLayout<LookupCodes<kFp4Table>, E4m3Scales, 16>;

}  // namespace
}  // namespace kvanta::kernels
