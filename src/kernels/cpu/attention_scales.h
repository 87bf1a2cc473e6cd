// Scales of 16 tokens as f32 lanes, whatever they are stored as; included by isa_<isa>.cc after its lanes.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Scales [index, index + 16) of a plane of this type. NaN bytes, which only unused slots hold, become some number.
template <formats::ScaleType kType>
KVANTA_INLINE Lanes::F LoadScalesOf(const uint8_t* plane, int index) {
  using enum formats::ScaleType;
  if constexpr (kType == kF32) return Lanes::Load(reinterpret_cast<const float*>(plane) + index);
  if constexpr (kType == kE4M3) return Lanes::LoadE4M3(plane + index);
  if constexpr (kType == kE8M0) return Lanes::LoadE8M0(plane + index);
  if constexpr (kType == kFp16) return Lanes::LoadFp16(reinterpret_cast<const uint16_t*>(plane) + index);
  return Lanes::Set1(1);
}

template <formats::ScaleType kType>
struct OfType {
  static constexpr formats::ScaleType kScale = kType;
};
// f(OfType<the plane's type>), kNone where there is no plane: a loop over scales asks for their type once.
template <class F>
KVANTA_INLINE void ForTypeOf(const ScalePlane& plane, F f) {
  using enum formats::ScaleType;
  switch (plane ? plane.type : kNone) {
    case kF32:
      return f(OfType<kF32>{});
    case kE4M3:
      return f(OfType<kE4M3>{});
    case kE8M0:
      return f(OfType<kE8M0>{});
    case kFp16:
      return f(OfType<kFp16>{});
    case kNone:
      return f(OfType<kNone>{});
  }
}

KVANTA_INLINE Lanes::F LoadScales(const ScalePlane& plane, int index) {
  Lanes::F scales = Lanes::Zero();
  ForTypeOf(plane, [&](auto type) { scales = LoadScalesOf<decltype(type)::kScale>(plane.data, index); });
  return scales;
}

}  // namespace
}  // namespace kvanta::kernels
