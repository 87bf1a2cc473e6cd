// Limits and arithmetic that encoders of trellis codes share (trellis.cc, klt.cc).
#pragma once

#include <algorithm>
#include <cstdint>

#include "formats/rounding.h"

namespace kvanta::formats {

constexpr float kMaxTrellisValue = 32 * kFp16Max;  // 39 to 42 scales, or with uneven bits 15: these may saturate
constexpr double kMinTrellisStep = 0x1p-30;        // far below any scale that fp16 holds

inline int32_t SaturateInt16(int32_t x) noexcept {
  return std::max(-32768, std::min(32767, x));
}

}  // namespace kvanta::formats
