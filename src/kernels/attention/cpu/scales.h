// Scales of 16 tokens as f32 lanes, whatever they are stored as; included by isa_<isa>.cc after its lanes.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Scales [index, index + 16) of a plane of this type. NaN bytes, which only unused slots hold, become some number.
template <formats::ScaleType kType>
KVANTA_INLINE Vec16::F LoadScalesOf(const uint8_t* section, int index) {
  using enum formats::ScaleType;
  if constexpr (kType == kF32) return Vec16::Load(reinterpret_cast<const float*>(section) + index);
  if constexpr (kType == kE4M3) return Vec16::LoadE4M3(section + index);
  if constexpr (kType == kE8M0) return Vec16::LoadE8M0(section + index);
  if constexpr (kType == kFp16) return Vec16::LoadFp16(reinterpret_cast<const uint16_t*>(section) + index);
  return Vec16::Set1(1);
}

template <formats::ScaleType kType>
struct OfType {
  static constexpr formats::ScaleType kScale = kType;
};
// f(OfType<the plane's type>), kNone where there is no plane: a loop over scales asks for their type once.
template <class F>
KVANTA_INLINE void ForTypeOf(const ScaleSection& section, F f) {
  using enum formats::ScaleType;
  switch (section ? section.type : kNone) {
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

KVANTA_INLINE Vec16::F LoadScales(const ScaleSection& section, int index) {
  Vec16::F scales = Vec16::Zero();
  ForTypeOf(section, [&](auto type) { scales = LoadScalesOf<decltype(type)::kScale>(section.data, index); });
  return scales;
}

}  // namespace
}  // namespace kvanta::kernels
