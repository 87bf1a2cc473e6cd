// Loads scales of 16 tokens as f32 lanes, for every storage type; included by isa_<isa>.cc after its Vec16.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Loads scales [index, index + 16) of this type. NaN bytes, which only unused slots hold, become an arbitrary number.
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
struct ScaleTypeTag {
  static constexpr formats::ScaleType kScale = kType;
};
// Calls f(ScaleTypeTag<type>) with the section's type (kNone without a section), so that a loop over scales dispatches
// once.
template <class F>
KVANTA_INLINE void DispatchScaleType(const ScaleSection& section, F f) {
  using enum formats::ScaleType;
  switch (section ? section.type : kNone) {
    case kF32:
      return f(ScaleTypeTag<kF32>{});
    case kE4M3:
      return f(ScaleTypeTag<kE4M3>{});
    case kE8M0:
      return f(ScaleTypeTag<kE8M0>{});
    case kFp16:
      return f(ScaleTypeTag<kFp16>{});
    case kNone:
      return f(ScaleTypeTag<kNone>{});
  }
}

KVANTA_INLINE Vec16::F LoadScales(const ScaleSection& section, int index) {
  Vec16::F scales = Vec16::Zero();
  DispatchScaleType(section, [&](auto type) { scales = LoadScalesOf<decltype(type)::kScale>(section.data, index); });
  return scales;
}

}  // namespace
}  // namespace kvanta::kernels
