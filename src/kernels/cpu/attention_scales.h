// Scales of 16 tokens as f32 lanes, whatever they are stored as; included by isa_<isa>.cc after its lanes.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Scales [index, index + 16) of the plane. NaN bytes, which only unused slots hold, become some number.
KVANTA_INLINE Lanes::F LoadScales(const ScalePlane& plane, int index) {
  const uint8_t* bytes = plane.data + index;
  switch (plane.type) {
    case formats::ScaleType::kF32:
      return Lanes::Load(reinterpret_cast<const float*>(plane.data) + index);
    case formats::ScaleType::kE4M3:
      return Lanes::LoadE4M3(bytes);
    case formats::ScaleType::kE8M0:
      return Lanes::LoadE8M0(bytes);
    default:
      return Lanes::LoadFp16(reinterpret_cast<const uint16_t*>(plane.data) + index);
  }
}

}  // namespace
}  // namespace kvanta::kernels
