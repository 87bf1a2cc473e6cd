// Scales of 16 tokens as f32 lanes, whatever they are stored as; included by isa_<isa>.cc after its lanes.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Bytes to f32 by their bits, then times `factor`. Plain loops over 16 become vector code.
KVANTA_INLINE Lanes::F ScalesFromBits(const uint32_t* bits, float factor) {
  float values[16];
  __builtin_memcpy(values, bits, sizeof values);
  return Lanes::Mul(Lanes::Load(values), Lanes::Set1(factor));
}

// Scales [index, index + 16) of the plane. NaN bytes, which only unused slots hold, become some number.
KVANTA_INLINE Lanes::F LoadScales(const ScalePlane& plane, int index) {
  uint32_t bits[16];
  const uint8_t* bytes = plane.data + index;
  switch (plane.type) {
    case formats::ScaleType::kF32:
      return Lanes::Load(reinterpret_cast<const float*>(plane.data) + index);
    case formats::ScaleType::kE4M3:
      // As an f32 with the exponent field unshifted: the value times 2^(7 - 127), subnormals included.
      for (int i = 0; i < 16; ++i) bits[i] = (bytes[i] & 0x7fU) << 20U | (bytes[i] & 0x80U) << 24U;
      return ScalesFromBits(bits, 0x1p120f);
    case formats::ScaleType::kE8M0:
      for (int i = 0; i < 16; ++i) bits[i] = bytes[i] == 0 ? 0x00400000U : uint32_t{bytes[i]} << 23U;
      return ScalesFromBits(bits, 1.0f);
    default:
      return Lanes::LoadFp16(reinterpret_cast<const uint16_t*>(plane.data) + index);
  }
}

}  // namespace
}  // namespace kvanta::kernels
