// Loads units of weight panels (fragment_layout.h) and decodes them to A operands. Include the primitives first.
//
// Codes become f16 by bit operations: the f16 0x6400 + u is 1024 + u, and an exact subtraction leaves the integer. A
// unit's products are then exact integers times x, with one scale multiplication in f32 per 32 channels.
#pragma once

#include "kernels/linear/cuda/fragment_layout.h"

namespace kvanta::kernels::cuda {

inline constexpr uint32_t kOneF16 = 0x3C003C00U;  // 1, 1
inline constexpr uint32_t kF16Bits1024 = 0x64006400U;
inline constexpr uint32_t kMinus1024 = 0xE400E400U;  // -1024, -1024
inline constexpr uint32_t kMinus1152 = 0xE480E480U;

KVANTA_DEVICE float LowF16(uint32_t pair) {
  return F16ToFloat(static_cast<uint16_t>(pair));
}
KVANTA_DEVICE float HighF16(uint32_t pair) {
  return F16ToFloat(static_cast<uint16_t>(pair >> 16U));
}

// 16-bit elements: operands as stored.
template <PanelKind kPanelKind>
struct ElementPanel {
  static constexpr PanelKind kKind = kPanelKind;
  static constexpr bool kScaled = false;
  static constexpr bool kHasMinimum = false;
  struct Raw {
    Vec4 step[2];
  };
  static KVANTA_DEVICE Raw Load(const uint8_t* unit, int lane) {
    return {{LoadStreamed4(unit + lane * 16), LoadStreamed4(unit + 512 + lane * 16)}};
  }
  // As Load, of a unit in shared memory.
  static KVANTA_DEVICE Raw FromShared(int unit, int lane) {
    return {{LoadShared<Vec4>(unit + lane * 16), LoadShared<Vec4>(unit + 512 + lane * 16)}};
  }
  static KVANTA_DEVICE Vec4 Operand(const Raw& raw, int step) { return raw.step[step]; }
  static KVANTA_DEVICE void Multiply(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) {
    if constexpr (kKind == PanelKind::kBf16) {
      MmaBf16(c, a, b0, b1);
    } else {
      MmaF16(c, a, b0, b1);
    }
  }
};

struct Int8Panel {
  static constexpr PanelKind kKind = PanelKind::kInt8;
  static constexpr bool kScaled = true;
  static constexpr bool kHasMinimum = false;
  struct Raw {
    Vec4 codes;
    uint32_t scales;
  };
  static KVANTA_DEVICE Raw Load(const uint8_t* unit, int lane) {
    return {LoadStreamed4(unit + lane * 16), LoadWord(unit + UnitBytesOf(kKind).codes + lane / 4 * 4)};
  }
  static KVANTA_DEVICE Raw FromShared(int unit, int lane) {
    return {LoadShared<Vec4>(unit + lane * 16), LoadShared<uint32_t>(unit + UnitBytesOf(kKind).codes + lane / 4 * 4)};
  }
  static KVANTA_DEVICE Vec4 Operand(const Raw& raw, int step) {
    const uint32_t g = raw.codes.word[2 * step], g8 = raw.codes.word[2 * step + 1];
    const auto pair = [](uint32_t codes, uint32_t selector) {
      return MultiplyAddF16(PermuteBytes(codes, kF16Bits1024, selector), kOneF16, kMinus1152);
    };
    return {{pair(g, 0x5150U), pair(g8, 0x5150U), pair(g, 0x5352U), pair(g8, 0x5352U)}};
  }
  static KVANTA_DEVICE void Multiply(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) { MmaF16(c, a, b0, b1); }
  static KVANTA_DEVICE uint32_t Scales(const Raw& raw) { return raw.scales; }
};

struct Int4Panel {
  static constexpr PanelKind kKind = PanelKind::kInt4;
  static constexpr bool kScaled = true;
  static constexpr bool kHasMinimum = true;
  struct Raw {
    Vec2 codes;
    Vec2 scales;  // scales of rows g, g + 8; minimums
  };
  static KVANTA_DEVICE Raw Load(const uint8_t* unit, int lane) {
    return {LoadStreamed2(unit + lane * 8), LoadVec2(unit + UnitBytesOf(kKind).codes + lane / 4 * 8)};
  }
  static KVANTA_DEVICE Raw FromShared(int unit, int lane) {
    return {LoadShared<Vec2>(unit + lane * 8), LoadShared<Vec2>(unit + UnitBytesOf(kKind).codes + lane / 4 * 8)};
  }
  static KVANTA_DEVICE Vec4 Operand(const Raw& raw, int step) {
    Vec4 a;
    KVANTA_UNROLL
    for (unsigned reg = 0; reg < 4; ++reg) {
      const uint32_t offset = AndXor(raw.codes.word[step] >> (4 * reg), 0x000F000FU, kF16Bits1024);
      a.word[reg] = MultiplyAddF16(offset, kOneF16, kMinus1024);
    }
    return a;
  }
  static KVANTA_DEVICE void Multiply(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) { MmaF16(c, a, b0, b1); }
  static KVANTA_DEVICE uint32_t Scales(const Raw& raw) { return raw.scales.word[0]; }
  static KVANTA_DEVICE uint32_t Minimums(const Raw& raw) { return raw.scales.word[1]; }
};

// A single value of W, for embeddings.
KVANTA_DEVICE float WeightValue(const Weight& weight, int64_t row, int64_t channel) {
  if (!weight.panels) return reinterpret_cast<const float*>(weight.data)[row * weight.in + channel];
  const UnitBytes bytes = UnitBytesOf(weight.kind);
  const uint8_t* unit = weight.data + (row / kPanelRows * weight.Units() + channel / kPanelChannels) * bytes.total;
  const auto in_panel = static_cast<int>(row % kPanelRows);
  const FragmentOffset offset = FragmentOffsetOf(weight.kind, in_panel, static_cast<int>(channel % kPanelChannels));
  const auto half = [&](int byte) { return *reinterpret_cast<const uint16_t*>(unit + byte); };
  if (weight.kind == PanelKind::kBf16) return std::bit_cast<float>(uint32_t{half(offset.byte)} << 16U);
  if (weight.kind == PanelKind::kF16) return F16ToFloat(half(offset.byte));
  const int scale_offset = ScaleOffset(weight.kind, in_panel);
  const float scale = F16ToFloat(half(scale_offset));
  if (weight.kind == PanelKind::kInt8) return scale * static_cast<float>(int{unit[offset.byte]} - 128);
  return scale * static_cast<float>((unit[offset.byte] >> offset.bit) & 15) + F16ToFloat(half(scale_offset + 4));
}

}  // namespace kvanta::kernels::cuda
