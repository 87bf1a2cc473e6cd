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

// A unit of a weight: its codes, and the scales apart from them.
struct UnitAt {
  const Weight& weight;
  const uint8_t* data;  // of this member of a group of weights
  int64_t panel;
  int64_t unit;

  template <PanelKind kKind>
  KVANTA_DEVICE const uint8_t* Codes() const {
    return data + (panel * weight.Units() + unit) * UnitBytesOf(kKind).total;
  }
  // The bytes for row g of [8 g].
  template <PanelKind kKind>
  KVANTA_DEVICE const uint8_t* Scales(int g) const {
    const int64_t group = IsBlocks(kKind) ? unit : unit >> weight.group_shift;
    return data + weight.scales_at + (panel * ScaleGroupsOf(weight) + group) * ScaleBytesOf(kKind) +
           g * (ScaleBytesOf(kKind) / 8);
  }
  template <PanelKind kKind>
  KVANTA_DEVICE const uint8_t* Factors(int g) const {
    const int64_t block = IsBlocks(kKind) ? unit >> weight.group_shift : 0;
    return data + weight.factors_at + (panel * FactorGroupsOf(weight) + block) * FactorBytesOf(kKind) +
           g * (FactorBytesOf(kKind) / 8);
  }
};

// 16-bit elements: operands as stored.
template <PanelKind kPanelKind>
struct ElementPanel {
  static constexpr PanelKind kKind = kPanelKind;
  static constexpr bool kScaled = false;
  static constexpr int kScales = 0;  // in a unit: one, or one for each step of 16 channels
  static constexpr bool kHasMinimum = false;
  struct Raw {
    Vec4 step[2];
  };
  static KVANTA_DEVICE Raw Load(const UnitAt& at, int lane) {
    const uint8_t* unit = at.Codes<kKind>();
    return {{LoadStreamed4(unit + lane * 16), LoadStreamed4(unit + 512 + lane * 16)}};
  }
  // As Load, with the codes in shared memory.
  static KVANTA_DEVICE Raw FromShared(int unit, const UnitAt& /*at*/, int lane) {
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

// Codes of 8 bits as f16: code + 128, two's complement or E4M3.
enum class ByteCode : uint8_t { kOffset128, kInt8, kE4m3 };
template <ByteCode kCode>
KVANTA_DEVICE uint32_t BytePair(uint32_t codes, bool high) {
  if constexpr (kCode == ByteCode::kE4m3) {
    if (kConvertsE4m3) return E4m3ToF16(high ? codes >> 16U : codes);
    const uint32_t spread = PermuteBytes(codes, 0, high ? 0x3424U : 0x1404U);  // each byte in the upper half of 16 bits
    return MultiplyF16(((spread & 0x7f007f00U) >> 1U) | (spread & 0x80008000U), 0x5c005c00U);  // times 2^8
  } else {
    if constexpr (kCode == ByteCode::kInt8) codes ^= 0x80808080U;
    return MultiplyAddF16(PermuteBytes(codes, kF16Bits1024, high ? 0x5352U : 0x5150U), kOneF16, kMinus1152);
  }
}
// Operand of 8-bit codes: [2 steps][row g, row g + 8] words of 4 channels.
template <ByteCode kCode>
KVANTA_DEVICE Vec4 ByteOperand(const Vec4& codes, int step) {
  const uint32_t g = codes.word[2 * step], g8 = codes.word[2 * step + 1];
  return {{BytePair<kCode>(g, false), BytePair<kCode>(g8, false), BytePair<kCode>(g, true), BytePair<kCode>(g8, true)}};
}

// Operand of 4-bit codes from 0 on; minus_zeros: f16 -(1024 + zero point) of rows g and g + 8.
KVANTA_DEVICE Vec4 NibbleOperand(uint32_t codes, uint32_t minus_zero, uint32_t minus_zero8) {
  Vec4 a;
  KVANTA_UNROLL
  for (unsigned reg = 0; reg < 4; ++reg) {
    const uint32_t offset = AndXor(codes >> (4 * reg), 0x000F000FU, kF16Bits1024);
    a.word[reg] = MultiplyAddF16(offset, kOneF16, reg % 2 == 0 ? minus_zero : minus_zero8);
  }
  return a;
}

// Operand of E2M1 codes: their bits as f16 are the values times 2^-14.
inline constexpr float kE2m1Factor = 16384.0F;
KVANTA_DEVICE Vec4 E2m1Operand(uint32_t codes) {
  Vec4 a;
  KVANTA_UNROLL
  for (unsigned reg = 0; reg < 4; ++reg) {
    const uint32_t fields = codes >> (4 * reg);
    a.word[reg] = ((fields << 12U) & 0x80008000U) | ((fields << 9U) & 0x0E000E00U);
  }
  return a;
}

KVANTA_DEVICE float E8m0ToFloat(uint32_t code) {
  return std::bit_cast<float>(code == 0 ? 0x00400000U : code << 23U);
}
// A code of a scale, which is not negative.
KVANTA_DEVICE float E4m3ToFloat(uint32_t code) {
  return F16ToFloat(static_cast<uint16_t>(code << 7U)) * 256.0F;
}

struct Int8Panel {
  static constexpr PanelKind kKind = PanelKind::kInt8;
  static constexpr bool kScaled = true;
  static constexpr int kScales = 1;
  static constexpr bool kHasMinimum = false;
  struct Raw {
    Vec4 codes;
    uint32_t scales;
  };
  static KVANTA_DEVICE Raw Load(const UnitAt& at, int lane) {
    const uint8_t* unit = at.Codes<kKind>();
    return {LoadStreamed4(unit + lane * 16), LoadWord(unit + UnitBytesOf(kKind).codes + lane / 4 * 4)};
  }
  static KVANTA_DEVICE Raw FromShared(int unit, const UnitAt& /*at*/, int lane) {
    return {LoadShared<Vec4>(unit + lane * 16), LoadShared<uint32_t>(unit + UnitBytesOf(kKind).codes + lane / 4 * 4)};
  }
  static KVANTA_DEVICE Vec4 Operand(const Raw& raw, int step) {
    return ByteOperand<ByteCode::kOffset128>(raw.codes, step);
  }
  static KVANTA_DEVICE void Multiply(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) { MmaF16(c, a, b0, b1); }
  // Scale of row g + 8 half.
  static KVANTA_DEVICE float Scale(const Raw& raw, int /*step*/, int half) {
    return half == 0 ? LowF16(raw.scales) : HighF16(raw.scales);
  }
};

struct Int4Panel {
  static constexpr PanelKind kKind = PanelKind::kInt4;
  static constexpr bool kScaled = true;
  static constexpr int kScales = 1;
  static constexpr bool kHasMinimum = true;
  struct Raw {
    Vec2 codes;
    Vec2 scales;  // scales of rows g, g + 8; minimums
  };
  static KVANTA_DEVICE Raw Load(const UnitAt& at, int lane) {
    const uint8_t* unit = at.Codes<kKind>();
    return {LoadStreamed2(unit + lane * 8), LoadVec2(unit + UnitBytesOf(kKind).codes + lane / 4 * 8)};
  }
  static KVANTA_DEVICE Raw FromShared(int unit, const UnitAt& /*at*/, int lane) {
    return {LoadShared<Vec2>(unit + lane * 8), LoadShared<Vec2>(unit + UnitBytesOf(kKind).codes + lane / 4 * 8)};
  }
  static KVANTA_DEVICE Vec4 Operand(const Raw& raw, int step) {
    return NibbleOperand(raw.codes.word[step], kMinus1024, kMinus1024);
  }
  static KVANTA_DEVICE void Multiply(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) { MmaF16(c, a, b0, b1); }
  static KVANTA_DEVICE float Scale(const Raw& raw, int /*step*/, int half) {
    return half == 0 ? LowF16(raw.scales.word[0]) : HighF16(raw.scales.word[0]);
  }
  static KVANTA_DEVICE float Minimum(const Raw& raw, int half) {
    return half == 0 ? LowF16(raw.scales.word[1]) : HighF16(raw.scales.word[1]);
  }
};

// Codes with their scales apart.
template <PanelKind kPanelKind>
struct GroupPanel {
  static constexpr PanelKind kKind = kPanelKind;
  static constexpr bool kScaled = true;
  static constexpr int kScales = kKind == PanelKind::kNvfp4 || kKind == PanelKind::kBlocks8 ? 2 : 1;
  static constexpr bool kHasMinimum = IsBlocks(kKind);
  static constexpr bool kBytes = CodeBitsOf(kKind) == 8;
  static constexpr int kScaleWords = kKind == PanelKind::kInt4Groups ? 4 : ScaleBytesOf(kKind) >= 64 ? 2 : 1;
  static constexpr bool kE4m3 = kKind == PanelKind::kE4m3Groups || kKind == PanelKind::kMxfp8;
  struct Raw {
    uint32_t codes[kBytes ? 4 : 2];
    uint32_t scales[kScaleWords];
    uint32_t factors[IsBlocks(kKind) ? 4 : 1];
  };
  static KVANTA_DEVICE Raw Load(const UnitAt& at, int lane) {
    Raw raw;
    const uint8_t* unit = at.Codes<kKind>();
    if constexpr (kBytes) {
      SetCodes(LoadStreamed4(unit + lane * 16), raw);
    } else {
      SetCodes(LoadStreamed2(unit + lane * 8), raw);
    }
    LoadScales(at, lane / 4, raw);
    return raw;
  }
  static KVANTA_DEVICE Raw FromShared(int unit, const UnitAt& at, int lane) {
    Raw raw;
    if constexpr (kBytes) {
      SetCodes(LoadShared<Vec4>(unit + lane * 16), raw);
    } else {
      SetCodes(LoadShared<Vec2>(unit + lane * 8), raw);
    }
    LoadScales(at, lane / 4, raw);
    return raw;
  }
  static KVANTA_DEVICE Vec4 Operand(const Raw& raw, int step) {
    if constexpr (kBytes) {
      const Vec4 codes{{raw.codes[0], raw.codes[1], raw.codes[2], raw.codes[3]}};
      return ByteOperand < kE4m3 ? ByteCode::kE4m3 : ByteCode::kInt8 > (codes, step);
    } else if constexpr (kKind == PanelKind::kInt4Groups) {
      return NibbleOperand(raw.codes[step], raw.scales[2], raw.scales[3]);
    } else if constexpr (kKind == PanelKind::kBlocks4) {
      return NibbleOperand(raw.codes[step], kMinus1024, kMinus1024);
    } else {
      return E2m1Operand(raw.codes[step]);
    }
  }
  static KVANTA_DEVICE void Multiply(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) { MmaF16(c, a, b0, b1); }
  static KVANTA_DEVICE float Scale(const Raw& raw, int step, int half) {
    if constexpr (kKind == PanelKind::kMxfp4 || kKind == PanelKind::kMxfp8) {
      const float scale = E8m0ToFloat(raw.scales[0] >> (8U * static_cast<unsigned>(half)) & 0xffU);
      return kKind == PanelKind::kMxfp4 ? scale * kE2m1Factor : scale;
    } else if constexpr (kKind == PanelKind::kNvfp4) {
      return E4m3ToFloat(raw.scales[0] >> (8U * static_cast<unsigned>(2 * half + step)) & 0x7fU);
    } else if constexpr (IsBlocks(kKind)) {
      const auto sub_scale = static_cast<int8_t>(raw.scales[half] >> (8U * static_cast<unsigned>(step)));
      return std::bit_cast<float>(raw.factors[half]) * static_cast<float>(sub_scale);
    } else {
      return std::bit_cast<float>(raw.scales[half]);
    }
  }
  static KVANTA_DEVICE float Minimum(const Raw& raw, int half) {
    return std::bit_cast<float>(raw.factors[2 + half]) * static_cast<float>(raw.scales[half] >> 16U & 0xffU);
  }

 private:
  template <class Vec>
  static KVANTA_DEVICE void SetCodes(const Vec& from, Raw& raw) {
    KVANTA_UNROLL
    for (int i = 0; i < (kBytes ? 4 : 2); ++i) raw.codes[i] = from.word[i];
  }
  static KVANTA_DEVICE void LoadScales(const UnitAt& at, int g, Raw& raw) {
    const uint8_t* scales = at.Scales<kKind>(g);
    if constexpr (kScaleWords == 4) {
      const Vec4 words = LoadVec4(scales);
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) raw.scales[i] = words.word[i];
    } else if constexpr (kScaleWords == 2) {
      const Vec2 words = LoadVec2(scales);
      raw.scales[0] = words.word[0];
      raw.scales[1] = words.word[1];
    } else if constexpr (kKind == PanelKind::kNvfp4) {
      raw.scales[0] = LoadWord(scales);
    } else {
      raw.scales[0] = *reinterpret_cast<const uint16_t*>(scales);
    }
    raw.factors[0] = 0;
    if constexpr (IsBlocks(kKind)) {
      const Vec4 words = LoadVec4(at.Factors<kKind>(g));
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) raw.factors[i] = words.word[i];
    }
  }
};

// Factor of row `row` of W, after the sum over all units.
KVANTA_DEVICE float RowFactor(const Weight& weight, const uint8_t* data, int64_t row) {
  if (weight.kind != PanelKind::kNvfp4) return 1.0F;
  const auto in_panel = static_cast<int>(row % kPanelRows);
  const UnitAt at{weight, data, row / kPanelRows, 0};
  return reinterpret_cast<const float*>(at.Factors<PanelKind::kNvfp4>(in_panel % 8))[in_panel / 8] * kE2m1Factor;
}

// Value of a code with its scales apart, by the decoding above.
template <PanelKind kKind>
KVANTA_DEVICE float GroupValue(const UnitAt& at, int row, int channel, int byte, int bit) {
  const uint8_t* unit = at.Codes<kKind>();
  const auto code = static_cast<uint32_t>(unit[byte] >> bit);
  const uint8_t* scales = at.Scales<kKind>(row % 8);
  const int half = row / 8;
  const auto word = [&](int i) { return reinterpret_cast<const uint32_t*>(scales)[i]; };
  const auto e2m1 = [&] { return F16ToFloat(static_cast<uint16_t>(E2m1Operand(code & 15U).word[0])) * kE2m1Factor; };
  if constexpr (kKind == PanelKind::kE4m3Groups) {
    return LowF16(BytePair<ByteCode::kE4m3>(code, false)) * std::bit_cast<float>(word(half));
  } else if constexpr (kKind == PanelKind::kInt8Groups) {
    return static_cast<float>(static_cast<int8_t>(code)) * std::bit_cast<float>(word(half));
  } else if constexpr (kKind == PanelKind::kInt4Groups) {
    const float zero = -1024.0F - LowF16(word(2 + half));
    return (static_cast<float>(code & 15U) - zero) * std::bit_cast<float>(word(half));
  } else if constexpr (kKind == PanelKind::kMxfp4) {
    return e2m1() * E8m0ToFloat(scales[half]);
  } else if constexpr (kKind == PanelKind::kMxfp8) {
    return LowF16(BytePair<ByteCode::kE4m3>(code, false)) * E8m0ToFloat(scales[half]);
  } else if constexpr (kKind == PanelKind::kNvfp4) {
    const float factor = reinterpret_cast<const float*>(at.Factors<kKind>(row % 8))[half];
    return e2m1() * (E4m3ToFloat(scales[2 * half + channel / 16] & 0x7fU) * factor);
  } else {
    const auto* factors = reinterpret_cast<const float*>(at.Factors<kKind>(row % 8));
    const float scale = factors[half] * static_cast<float>(static_cast<int8_t>(scales[4 * half + channel / 16]));
    const auto integer = kKind == PanelKind::kBlocks4 ? static_cast<int>(code & 15U) : static_cast<int8_t>(code);
    return MultiplyAdd(scale, static_cast<float>(integer),
                       factors[2 + half] * static_cast<float>(scales[4 * half + 2]));
  }
}

// A single value of W, for embeddings.
KVANTA_DEVICE float WeightValue(const Weight& weight, int64_t row, int64_t channel) {
  if (!weight.panels) return reinterpret_cast<const float*>(weight.data)[row * weight.in + channel];
  const UnitAt at{weight, weight.data, row / kPanelRows, channel / kPanelChannels};
  const auto in_panel = static_cast<int>(row % kPanelRows);
  const auto in_unit = static_cast<int>(channel % kPanelChannels);
  const FragmentOffset offset = FragmentOffsetOf(weight.kind, in_panel, in_unit);
  const auto group_value = [&]<PanelKind kKind>() {
    return GroupValue<kKind>(at, in_panel, in_unit, offset.byte, offset.bit);
  };
  switch (weight.kind) {
    case PanelKind::kE4m3Groups:
      return group_value.template operator()<PanelKind::kE4m3Groups>();
    case PanelKind::kInt8Groups:
      return group_value.template operator()<PanelKind::kInt8Groups>();
    case PanelKind::kInt4Groups:
      return group_value.template operator()<PanelKind::kInt4Groups>();
    case PanelKind::kMxfp4:
      return group_value.template operator()<PanelKind::kMxfp4>();
    case PanelKind::kMxfp8:
      return group_value.template operator()<PanelKind::kMxfp8>();
    case PanelKind::kNvfp4:
      return group_value.template operator()<PanelKind::kNvfp4>();
    case PanelKind::kBlocks4:
      return group_value.template operator()<PanelKind::kBlocks4>();
    case PanelKind::kBlocks8:
      return group_value.template operator()<PanelKind::kBlocks8>();
    case PanelKind::kBf16:
    case PanelKind::kF16:
    case PanelKind::kInt8:
    case PanelKind::kInt4:
      break;
  }
  const uint8_t* unit = weight.data + (at.panel * weight.Units() + at.unit) * UnitBytesOf(weight.kind).total;
  const auto half = [&](int byte) { return *reinterpret_cast<const uint16_t*>(unit + byte); };
  if (weight.kind == PanelKind::kBf16) return std::bit_cast<float>(uint32_t{half(offset.byte)} << 16U);
  if (weight.kind == PanelKind::kF16) return F16ToFloat(half(offset.byte));
  const int scale_offset = ScaleOffset(weight.kind, in_panel);
  const float scale = F16ToFloat(half(scale_offset));
  if (weight.kind == PanelKind::kInt8) return scale * static_cast<float>(int{unit[offset.byte]} - 128);
  return scale * static_cast<float>((unit[offset.byte] >> offset.bit) & 15) + F16ToFloat(half(scale_offset + 4));
}

}  // namespace kvanta::kernels::cuda
