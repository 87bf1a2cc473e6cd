// Element types of weights and activations (not of cache formats), and conversions by value.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace kvanta {

enum class DType : uint8_t { kF32, kBf16, kF16 };

// Bytes per element.
constexpr int SizeOf(DType type) noexcept {
  return type == DType::kF32 ? 4 : 2;
}
std::string_view Name(DType type) noexcept;  // "float32", "bfloat16", "float16"
DType ParseDType(std::string_view name);     // throws InputError with the alternatives

// bf16 <-> f32. Round to nearest even; NaN stays a (quiet) NaN; infinities stay (cache formats saturate, see formats/).
constexpr float Bf16ToFloat(uint16_t bits) noexcept {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}
constexpr uint16_t FloatToBf16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// fp16 <-> f32, round to nearest even, subnormals kept, overflow to infinity.
float Fp16ToFloat(uint16_t bits) noexcept;
uint16_t FloatToFp16(float value) noexcept;

}  // namespace kvanta
