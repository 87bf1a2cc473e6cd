// Limits and arithmetic that encoders of trellis codes share (trellis.cc, klt.cc, kernels/attention/cuda).
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/host_device.h"
#include "formats/rounding.h"

namespace kvanta::formats {

constexpr float kMaxTrellisValue = 32 * kFp16Max;  // 39 to 42 scales, or with uneven bits 15: these may saturate
constexpr double kMinTrellisStep = 0x1p-30;        // far below any scale that fp16 holds

KVANTA_HD inline int32_t SaturateInt16(int32_t x) noexcept {
  return std::max(-32768, std::min(32767, x));
}

// Packs the codes of 8 elements, `bits` bits each, to as many bytes.
KVANTA_HD inline void PackOctet(int bits, const uint8_t* codes, uint8_t* out) noexcept {
  uint64_t string = 0;
  for (int i = 0; i < 8; ++i) string |= uint64_t{codes[i]} << static_cast<unsigned>(bits * i);
  for (int i = 0; i < bits; ++i) out[i] = static_cast<uint8_t>(string >> static_cast<unsigned>(8 * i));
}

// The levels of 8 elements by their windows: `bits` bytes of codes, then `next`. table: [256].
KVANTA_HD inline void OctetLevels(int bits, const uint8_t* codes, uint8_t next, const int8_t* table,
                                  int8_t* levels) noexcept {
  uint64_t string = uint64_t{next} << static_cast<unsigned>(8 * bits);
  for (int i = 0; i < bits; ++i) string |= uint64_t{codes[i]} << static_cast<unsigned>(8 * i);
  for (int i = 0; i < 8; ++i) levels[i] = table[string >> static_cast<unsigned>(bits * i) & 0xff];
}

// The code, of `bits` bits, whose level is nearest to a target of `unit` per level, of two the lower. Levels ascend.
KVANTA_HD inline uint8_t ScalarCode(int bits, const int8_t* levels, int unit, int32_t target) noexcept {
  int code = 0;
  for (int half = 1 << (bits - 1); half != 0; half /= 2) {
    const int next = code + half;
    if (target > unit * (levels[next - 1] + levels[next]) / 2) code = next;
  }
  return static_cast<uint8_t>(code);
}

}  // namespace kvanta::formats
