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
  static constexpr float kScaleFactor = 256;
  KVANTA_INLINE void Load(const uint8_t* p, Vec16::F /*zero*/, Vec16::F& even, Vec16::F& odd) const {
    Vec16::LoadE4M3Pair(p, even,
                        odd);  // times 2^-8, which the scales compensate for: f32 as stored, others when loaded
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
    if constexpr (requires { Codes::kScaleFactor; } && Scales::kBytes == kPanelColumns) {
      return Vec16::Mul(scale, Vec16::Set1(Codes::kScaleFactor));
    }
    if constexpr (!Scales::kHasTensorScale) return scale;
    return Vec16::Mul(scale, Vec16::Load(reinterpret_cast<const float*>(w + kTensorScaleAt)));
  }
  static KVANTA_INLINE Vec16::F Zero(const uint8_t* w, int group) {
    if constexpr (!Codes::kHasZeros) return Vec16::Zero();
    return Vec16::LoadUint8(w + kZerosAt + group * kPanelColumns);
  }
};

// Decoders of the codes and loaders of the scales of a format.
template <weights::CodeType kType>
struct CodesOfType;
template <>
struct CodesOfType<weights::CodeType::kE4M3> : E4m3Codes {};
template <>
struct CodesOfType<weights::CodeType::kInt8> : Int8Codes {};
template <>
struct CodesOfType<weights::CodeType::kInt4> : Int4Codes {};
template <>
struct CodesOfType<weights::CodeType::kNf4> : LookupCodes<kNf4Table> {};
template <>
struct CodesOfType<weights::CodeType::kE2M1> : LookupCodes<kFp4Table> {};

template <weights::GroupScale kScale>
struct ScalesOfType;
template <>
struct ScalesOfType<weights::GroupScale::kF32> : F32Scales {};
template <>
struct ScalesOfType<weights::GroupScale::kE8M0> : E8m0Scales {};
template <>
struct ScalesOfType<weights::GroupScale::kE4M3> : E4m3Scales {};

// kFormat: an index of weights::kKernelFormats.
template <int kFormat>
using LayoutOfFormat =
    QuantizedLayout<CodesOfType<weights::kKernelFormats[kFormat].codes>,
                    ScalesOfType<weights::kKernelFormats[kFormat].scales>, weights::kKernelFormats[kFormat].group>;

}  // namespace
}  // namespace kvanta::kernels
