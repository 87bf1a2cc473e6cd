// Asymmetric codes: 2^b - 1 equal steps from a group's minimum to its maximum.
//
//   scale = fp16((max - min) / (2^b - 1)),   offset = fp16(min)
//   code = clamp(rne((x - offset) / scale), 0, 2^b - 1),   x_hat = scale * code + offset
//
// max and min are those of the values clamped to fp16's range, NaN as 0. A constant group has scale 0 and codes 0.
#pragma once

#include <limits>

#include "formats/bit_planes.h"
#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/rounding.h"

namespace kvanta::formats {

struct AsymmetricScale {
  uint16_t scale;   // fp16
  uint16_t offset;  // fp16
};

// Encodes x[0], x[stride], ... (n of them) to fields with the same stride.
template <int kBits>
KVANTA_HD AsymmetricScale EncodeGroup(const float* x, int n, int stride, uint8_t* fields,
                                      EncodeCounts& counts) noexcept {
  constexpr auto kTop = static_cast<float>((1 << kBits) - 1);
  float low = std::numeric_limits<float>::infinity();
  float high = -low;
  for (int i = 0; i < n; ++i) {
    CountRow(x + i * stride, 1, kFp16Max, counts);
    const float value = ClampOrZero(x[i * stride], kFp16Max);
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool saturated = false;  // cannot happen: the range is at most 131,008 / 3
  const uint16_t offset_bits = RoundScale(low, saturated);
  const uint16_t scale_bits = RoundScale((high - low) / kTop, saturated);
  const float offset = Fp16ToFloat(offset_bits);
  const float scale = scale_bits == 0 ? std::numeric_limits<float>::infinity() : Fp16ToFloat(scale_bits);
  for (int i = 0; i < n; ++i) {
    const float code = (ClampOrZero(x[i * stride], kFp16Max) - offset) / scale;
    fields[i * stride] = static_cast<uint8_t>(RoundToInt(std::max(0.0F, std::min(kTop, code))));
  }
  return {scale_bits, offset_bits};
}

inline float DecodeAsymmetric(float value, const uint8_t* scale, const uint8_t* offset) noexcept {
  return value * Fp16ToFloat(LoadBytes<uint16_t>(scale)) + Fp16ToFloat(LoadBytes<uint16_t>(offset));
}

// One group per (token, head).
template <ElementType kUnsignedCode>
struct UnsignedRow : FormatTraits {
  static constexpr ElementType kElementType = kUnsignedCode;
  static constexpr Scaling kScaling = {.token = ScaleType::kFp16, .token_offset = true};
  static constexpr std::string_view kRule =
      "s = fp16((max - min) / (2^bits - 1)), z = fp16(min) of the row; code = clamp(rne((x - z) / s), 0, 2^bits - 1)";

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                                  EncodeCounts& counts) noexcept {
    uint8_t fields[kLongestRow];
    const int channels = head_dim - head.unused_channels;
    const AsymmetricScale scale = EncodeGroup<CodeBits(kElementType)>(x, channels, 1, fields, counts);
    for (int i = channels; i < head_dim; ++i) fields[i] = 0;
    StoreBytes(out.token_scales, scale.scale);
    StoreBytes(out.token_offsets, scale.offset);
    PackFields<kElementType>(fields, head_dim, out.codes);
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    DecodeLevels<kElementType>(in.codes, head_dim, x);
    for (int i = 0; i < head_dim; ++i) x[i] = DecodeAsymmetric(x[i], in.token_scales, in.token_offsets);
  }
};

// One group per 32 channels of a token.
template <ElementType kUnsignedCode>
struct UnsignedBlock : FormatTraits {
  static constexpr ElementType kElementType = kUnsignedCode;
  static constexpr int kBlock = 32;
  static constexpr Scaling kScaling = {.block = ScaleType::kFp16, .channels = kBlock, .block_offset = true};
  static constexpr std::string_view kRule =
      "s = fp16((max - min) / (2^bits - 1)), z = fp16(min) of 32 channels; code = clamp(rne((x - z) / s), 0, 2^bits - "
      "1)";

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                                  EncodeCounts& counts) noexcept {
    uint8_t fields[kLongestRow];
    const int channels = head_dim - head.unused_channels;
    int begin = 0;
    for (; begin + kBlock <= channels; begin += kBlock) EncodeBlock(x, begin, kBlock, fields, out, counts);
    if (begin < channels) EncodeBlock(x, begin, channels - begin, fields, out, counts);
    for (int i = channels; i < head_dim; ++i) fields[i] = 0;
    PackFields<kElementType>(fields, head_dim, out.codes);
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    DecodeLevels<kElementType>(in.codes, head_dim, x);
    for (int i = 0; i < head_dim; ++i) {
      x[i] = DecodeAsymmetric(x[i], in.block_scales + i / kBlock * 2, in.block_offsets + i / kBlock * 2);
    }
  }

 private:
  // Inline, so that whole blocks have a constant number of channels.
  KVANTA_HD __attribute__((always_inline)) static inline void EncodeBlock(const float* x, int begin, int channels,
                                                                          uint8_t* fields, RowSections out,
                                                                          EncodeCounts& counts) noexcept {
    const AsymmetricScale scale = EncodeGroup<CodeBits(kElementType)>(x + begin, channels, 1, fields + begin, counts);
    StoreBytes(out.block_scales + begin / kBlock * 2, scale.scale);
    StoreBytes(out.block_offsets + begin / kBlock * 2, scale.offset);
  }
};

// One group per channel of 32 tokens.
template <ElementType kUnsignedCode>
struct UnsignedTokenGroup : FormatTraits {
  static constexpr ElementType kElementType = kUnsignedCode;
  static constexpr int kTokenGroup = 32;
  static constexpr Scaling kScaling = {.token_group = kTokenGroup};
  static constexpr ExactPages kExact = ExactPages::kOpen;
  static constexpr int kSinkPages = 1;
  static constexpr std::string_view kRule =
      "K: s = fp16((max - min) / (2^bits - 1)), z = fp16(min) of a channel of 32 tokens; V: of 32 channels of a token; "
      "code = clamp(rne((x - z) / s), 0, 2^bits - 1)";

  static void EncodeTokenGroup(const float* x, int head_dim, HeadParameters /*head*/, GroupSections out,
                               EncodeCounts& counts) noexcept {
    uint8_t fields[kTokenGroup * kLongestRow];
    for (int channel = 0; channel < head_dim; ++channel) {
      const AsymmetricScale scale =
          EncodeGroup<CodeBits(kElementType)>(x + channel, kTokenGroup, head_dim, fields + channel, counts);
      StoreBytes(out.channel_scales + 2 * channel, scale.scale);
      StoreBytes(out.channel_offsets + 2 * channel, scale.offset);
    }
    for (int token = 0; token < kTokenGroup; ++token) {
      PackFields<kElementType>(fields + token * head_dim, head_dim,
                               out.codes + token * (head_dim * CodeBits(kElementType) / 8));
    }
  }

  static void DecodeTokenGroup(ConstGroupSections in, int head_dim, float* x) noexcept {
    for (int token = 0; token < kTokenGroup; ++token) {
      float* row = x + token * head_dim;
      DecodeLevels<kElementType>(in.codes + token * (head_dim * CodeBits(kElementType) / 8), head_dim, row);
      for (int i = 0; i < head_dim; ++i) {
        row[i] = DecodeAsymmetric(row[i], in.channel_scales + 2 * i, in.channel_offsets + 2 * i);
      }
    }
  }
};

}  // namespace kvanta::formats
