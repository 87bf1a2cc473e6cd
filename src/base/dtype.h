// Element types of weights and activations (not of cache formats), and conversions by value.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "base/host_device.h"

namespace kvanta {

enum class DType : uint8_t { kF32, kBf16, kF16 };

// Bytes per element.
constexpr int SizeOf(DType type) noexcept {
  return type == DType::kF32 ? 4 : 2;
}
std::string_view Name(DType type) noexcept;  // "float32", "bfloat16", "float16"
DType ParseDType(std::string_view name);     // throws InputError with the alternatives

// bf16 <-> f32. Round to nearest even; NaN stays a (quiet) NaN; infinities stay (cache formats saturate, see formats/).
KVANTA_HD constexpr float Bf16ToFloat(uint16_t bits) noexcept {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}
KVANTA_HD constexpr uint16_t FloatToBf16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// fp16 <-> f32, round to nearest even, subnormals kept, overflow to infinity.
KVANTA_HD constexpr float Fp16ToFloat(uint16_t bits) noexcept {
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fU;
  const uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Zero and subnormals: mantissa * 2^-24, exact in f32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

KVANTA_HD constexpr uint16_t FloatToFp16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  if (magnitude >= 0x477ff000U) return static_cast<uint16_t>(sign | 0x7c00U);  // >= 65520 rounds to infinity
  if (magnitude < 0x38800000U) {
    // Below the smallest normal: adding 0.5 aligns the significand so that the FPU rounds to a multiple of 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000U));
  }
  const uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

}  // namespace kvanta
