// int4: codes -8..7 in blocks of 32 channels with one fp16 scale each, after a Hadamard transform; the open and the
// first page are exact.
//
//   d = m / -8, m the block's first element of largest magnitude, so m itself is code -8
//   code = clamp(rne(x / d), -8, 7),   scale = fp16(sum(x code) / sum(code code)),   x_hat = scale * code
//
// The least-squares scale takes 15 % off the KL divergence against scale = fp16(d).
#pragma once

#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/rounding.h"

namespace kvanta::formats {

struct Int4 : FormatTraits {
  static constexpr std::string_view kName = "int4";
  static constexpr std::array<std::string_view, 1> kAliases = {"int4_g32"};
  static constexpr std::string_view kSummary =
      "4-bit integers, fp16 least-squares scale per 32 channels, hadamard, open and first page exact";
  static constexpr std::string_view kRule =
      "d = m / -8, m the block's first element of largest magnitude; code = clamp(rne(x / d), -8, 7); "
      "s = fp16(sum(x code) / sum(code code))";
  static constexpr Code kCode = Code::kInt4;
  static constexpr Scale kScale = Scale::kPerBlock;
  static constexpr int kBlock = 32;
  static constexpr int kBlockScaleBytes = 2;
  static constexpr bool kHadamard = true;
  static constexpr ExactPages kExact = ExactPages::kOpen;
  static constexpr int kSinkPages = 1;

  static constexpr float kMax = 8.0F * kFp16Max;  // largest value that any scale can hold

  static void EncodeRow(const float* x, int head_dim, float /*static_scale*/, RowPlanes out,
                        EncodeCounts& counts) noexcept {
    for (int begin = 0; begin < head_dim; begin += kBlock) {
      const uint16_t scale = EncodeBlock(x + begin, out.codes + begin / 2, counts);
      StoreBytes(out.block_scales + begin / kBlock * kBlockScaleBytes, scale);
    }
  }

  static void DecodeRow(ConstRowPlanes in, int head_dim, float /*static_scale*/, float* x) noexcept {
    for (int i = 0; i < head_dim; i += 2) {
      const float scale = Fp16ToFloat(LoadBytes<uint16_t>(in.block_scales + i / kBlock * kBlockScaleBytes));
      const int byte = in.codes[i / 2];
      x[i] = scale * static_cast<float>((byte & 15) - 8);
      x[i + 1] = scale * static_cast<float>((byte >> 4) - 8);
    }
  }

 private:
  // Writes 16 bytes of nibbles (code + 8, low nibble = even channel) and returns the scale.
  static uint16_t EncodeBlock(const float* values, uint8_t* nibbles, EncodeCounts& counts) noexcept {
    const int64_t saturated_before = counts.saturated;
    CountRow(values, kBlock, kMax, counts);
    float x[kBlock];
    int32_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
      x[i] = ClampOrZero(values[i], kMax);
      largest = std::max(largest, MagnitudeBits(x[i]));
    }
    int first = 0;
    while (MagnitudeBits(x[first]) != largest) ++first;
    const float d = x[first] / -8.0F;

    uint16_t scale = 0;
    int32_t codes[kBlock] = {};
    if (d != 0.0F) {
      for (int i = 0; i < kBlock; ++i) codes[i] = RoundToInt(std::max(-8.0F, std::min(7.0F, x[i] / d)));
      float xq = 0.0F;  // sums in channel order: the order is part of the format
      float qq = 0.0F;
      for (int i = 0; i < kBlock; ++i) {
        const auto q = static_cast<float>(codes[i]);
        xq += x[i] * q;
        qq += q * q;
      }
      bool saturated = false;
      scale = RoundScale(xq / qq, saturated);
      // The largest magnitude can pass while its scale does not (codes clamped at 7 make it grow): one value counts.
      if (saturated && counts.saturated == saturated_before) ++counts.saturated;
    }
    if (scale == 0) std::fill(codes, codes + kBlock, 0);
    for (int i = 0; i < kBlock / 2; ++i) {
      nibbles[i] = static_cast<uint8_t>((codes[2 * i] + 8) | ((codes[2 * i + 1] + 8) << 4));
    }
    return scale;
  }
};

}  // namespace kvanta::formats
