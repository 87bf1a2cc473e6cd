#include "base/dtype.h"

#include <fmt/format.h>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta {

std::string_view Name(DType type) noexcept {
  switch (type) {
    case DType::kF32:
      return "float32";
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
  }
  return "unknown";
}

DType ParseDType(std::string_view name) {
  if (name == "float32" || name == "float" || name == "fp32" || name == "f32") return DType::kF32;
  if (name == "bfloat16" || name == "bf16") return DType::kBf16;
  if (name == "float16" || name == "half" || name == "fp16" || name == "f16") return DType::kF16;
  throw InputError(fmt::format("unknown dtype {}; known: float32, bfloat16, float16", Quote(name)));
}

float Fp16ToFloat(uint16_t bits) noexcept {
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fU;
  const uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Zero and subnormals: mantissa * 2^-24, exact in f32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t FloatToFp16(float value) noexcept {
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
