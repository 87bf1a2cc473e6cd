// turboquant_*: vLLM's presets. K: after a Hadamard transform the Lloyd-Max levels of a normal distribution, times a
// scale that gives the row its norm back ("nc", norm correction); or plain E4M3. V: uniform steps per token. The first
// and last two layers stay in bf16. (TurboQuant, Zandieh et al. 2025. The bytes are Kvanta's own.)
#pragma once

#include <algorithm>
#include <cmath>

#include "formats/fp8_e4m3.h"
#include "formats/unsigned_group.h"

namespace kvanta::formats {

template <ElementType kLloydCode>
struct LloydRow : FormatTraits {
  static constexpr ElementType kElementType = kLloydCode;
  static constexpr Scaling kScaling = {.token = ScaleType::kFp16};
  static constexpr bool kHadamard = true;
  static constexpr int kBoundaryLayers = 2;
  static constexpr std::string_view kRule =
      "K: code = nearest Lloyd-Max level to x / rms(x); s = fp16(|x| / |levels of the codes|); V: s = fp16((max - min) "
      "/ (2^bits - 1)), z = fp16(min) of the row; code = clamp(rne((x - z) / s), 0, 2^bits - 1)";

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                                  EncodeCounts& counts) noexcept {
    constexpr int kCount = 1 << CodeBits(kElementType);
    constexpr CodeLevels kTable = Levels(kElementType);
    const int64_t saturated_before = counts.saturated;
    const int channels = head_dim - head.unused_channels;
    CountRow(x, channels, kFp16Max, counts);
    double square = 0;  // in channel order: the order is part of the format
    for (int i = 0; i < channels; ++i) {
      const double value = ClampOrZero(x[i], kFp16Max);
      square += value * value;
    }
    const double step = std::sqrt(square / channels) * double{kTable.unit};
    uint8_t fields[kLongestRow];
    double level_square = 0;
    for (int i = 0; i < channels; ++i) {
      const double steps = square == 0 ? 0 : ClampOrZero(x[i], kFp16Max) / step;
      int field = 0;
      while (field + 1 < kCount && steps > 0.5 * (kTable.level[field] + kTable.level[field + 1])) ++field;
      fields[i] = static_cast<uint8_t>(field);
      level_square += kTable.level[field] * kTable.level[field];
    }
    constexpr auto kZero = static_cast<uint8_t>(kCount / 2 - 1);  // field of a row of zeros
    for (int i = channels; i < head_dim; ++i) fields[i] = kZero;
    bool saturated = false;
    const uint16_t scale =
        RoundScale(static_cast<float>(std::sqrt(square / level_square) / double{kTable.unit}), saturated);
    // The values can pass while the norm correction makes their scale grow: one counts.
    if (saturated && counts.saturated == saturated_before) ++counts.saturated;
    if (scale == 0) std::fill_n(fields, head_dim, kZero);
    StoreBytes(out.token_scales, scale);
    PackFields<kElementType>(fields, head_dim, out.codes);
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    DecodeLevels<kElementType>(in.codes, head_dim, x);
    for (int i = 0; i < head_dim; ++i) x[i] *= Fp16ToFloat(LoadBytes<uint16_t>(in.token_scales));
  }
};

struct TurboquantValues4 : UnsignedRow<ElementType::kUint4> {
  static constexpr std::string_view kName = "turboquant_v4";
  static constexpr std::string_view kSummary = "V of turboquant_*: 4-bit steps per token";
};
struct TurboquantValues3 : UnsignedRow<ElementType::kUint3> {
  static constexpr std::string_view kName = "turboquant_v3";
  static constexpr std::string_view kSummary = "V of turboquant_*: 3-bit steps per token";
};

struct TurboquantK8V4 : Fp8E4m3 {
  static constexpr std::string_view kName = "turboquant_k8v4";
  static constexpr std::string_view kLatentFormat = {};
  static constexpr std::array<std::string_view, 0> kAliases = {};
  static constexpr std::string_view kSummary =
      "K: E4M3, static scale; V: 4-bit steps, fp16 scale and zero per (token, head); two layers at either end bf16";
  static constexpr std::string_view kRule =
      "K: code = e4m3(x / s), s the head's static scale (1.0 if none was given); V: s = fp16((max - min) / (2^bits - "
      "1)), z = fp16(min) of the row; code = clamp(rne((x - z) / s), 0, 2^bits - 1)";
  static constexpr int kBoundaryLayers = 2;
  using Values = TurboquantValues4;
};

struct Turboquant4BitNc : LloydRow<ElementType::kLloyd4> {
  static constexpr std::string_view kName = "turboquant_4bit_nc";
  static constexpr std::string_view kSummary =
      "K: 4-bit Lloyd-Max levels, fp16 scale per (token, head), hadamard; V: 4-bit steps, fp16 scale and zero; two "
      "layers at either end bf16";
  using Values = TurboquantValues4;
};
struct TurboquantK3V4Nc : LloydRow<ElementType::kLloyd3> {
  static constexpr std::string_view kName = "turboquant_k3v4_nc";
  static constexpr std::string_view kSummary = "turboquant_4bit_nc with 3-bit keys";
  using Values = TurboquantValues4;
};
struct Turboquant3BitNc : LloydRow<ElementType::kLloyd3> {
  static constexpr std::string_view kName = "turboquant_3bit_nc";
  static constexpr std::string_view kSummary = "turboquant_4bit_nc with 3-bit keys and values";
  using Values = TurboquantValues3;
};

}  // namespace kvanta::formats
