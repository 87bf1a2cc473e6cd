// The signed codes of 2 to 6 bits in blocks of 32 channels, one fp16 scale each, after a Hadamard transform:
//
//   d = m / -2^(b-1), m the block's first element of largest magnitude, so m itself is the code -2^(b-1)
//   code = clamp(rne(x / d), -2^(b-1), 2^(b-1) - 1),   scale = fp16(sum(x code) / sum(code code)),   x_hat = scale *
//   code
//
// The least-squares scale takes 15 % off the KL divergence of 4 bits against scale = fp16(d).
#pragma once

#include "formats/bit_planes.h"
#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/rounding.h"

namespace kvanta::formats {

template <ElementType kSignedCode>
struct SignedBlock : FormatTraits {
  static constexpr ElementType kElementType = kSignedCode;
  static constexpr int kBlock = 32;
  static constexpr Scaling kScaling = {.block = ScaleType::kFp16, .channels = kBlock};
  static constexpr bool kHadamard = true;
  static constexpr ExactPages kExact = ExactPages::kOpen;
  static constexpr std::string_view kRule =
      "h = 2^(bits - 1); d = m / -h, m the block's first element of largest magnitude; code = clamp(rne(x / d), -h, "
      "h - 1); s = fp16(sum(x code) / sum(code code))";

  static constexpr int kHalf = 1 << (CodeBits(kElementType) - 1);
  static constexpr float kMax = static_cast<float>(kHalf) * kFp16Max;  // largest value that any scale can hold

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    uint8_t fields[kLongestRow];
    for (int begin = 0; begin < head_dim; begin += kBlock) {
      const uint16_t scale = EncodeBlock(x + begin, fields + begin, counts);
      StoreBytes(out.block_scales + begin / kBlock * 2, scale);
    }
    PackFields<kElementType>(fields, head_dim, out.codes);
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    DecodeLevels<kElementType>(in.codes, head_dim, x);
    for (int i = 0; i < head_dim; ++i) x[i] *= Fp16ToFloat(LoadBytes<uint16_t>(in.block_scales + i / kBlock * 2));
  }

 private:
  // Writes the fields (code + kHalf) of a block and returns its scale.
  KVANTA_HD static uint16_t EncodeBlock(const float* values, uint8_t* fields, EncodeCounts& counts) noexcept {
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
    const float d = x[first] / static_cast<float>(-kHalf);

    uint16_t scale = 0;
    int32_t codes[kBlock] = {};
    if (d != 0.0F) {
      constexpr auto kLowest = static_cast<float>(-kHalf);
      for (int i = 0; i < kBlock; ++i) {
        codes[i] = RoundToInt(std::max(kLowest, std::min(static_cast<float>(kHalf - 1), x[i] / d)));
      }
      float xq = 0.0F;  // sums in channel order: the order is part of the format
      float qq = 0.0F;
      for (int i = 0; i < kBlock; ++i) {
        const auto q = static_cast<float>(codes[i]);
        xq += x[i] * q;
        qq += q * q;
      }
      bool saturated = false;
      scale = RoundScale(xq / qq, saturated);
      // The largest magnitude can pass while its scale does not (codes clamped at the top make it grow): one value
      // counts.
      if (saturated && counts.saturated == saturated_before) ++counts.saturated;
    }
    if (scale == 0) std::fill(codes, codes + kBlock, 0);
    for (int i = 0; i < kBlock; ++i) fields[i] = static_cast<uint8_t>(codes[i] + kHalf);
    return scale;
  }
};

}  // namespace kvanta::formats
