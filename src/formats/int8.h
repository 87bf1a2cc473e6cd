// int8: codes -127..127 with one fp16 scale per (token, head), after a Hadamard transform.
//
//   scale = fp16(amax / 127),   code = clamp(rne(x / scale), -127, 127),   x_hat = scale * code
#pragma once

#include <limits>

#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/rounding.h"

namespace kvanta::formats {

struct Int8 : FormatTraits {
  static constexpr std::string_view kName = "int8";
  static constexpr std::string_view kLatentFormat = "mla_int8";
  static constexpr std::array<std::string_view, 1> kAliases = {"int8_per_token_head"};
  static constexpr std::string_view kSummary = "8-bit integers, fp16 scale per (token, head), hadamard";
  static constexpr std::string_view kRule = "s = fp16(amax / 127); code = clamp(rne(x / s), -127, 127)";
  static constexpr ElementType kElementType = ElementType::kInt8;
  static constexpr Scaling kScaling = {.token = ScaleType::kFp16};
  static constexpr bool kHadamard = true;

  static constexpr float kMaxCode = 127.0F;
  static constexpr float kMax = kMaxCode * kFp16Max;  // largest value that any scale can hold

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    CountRow(x, head_dim, kMax, counts);
    int32_t magnitude = 0;
    for (int i = 0; i < head_dim; ++i) magnitude = std::max(magnitude, MagnitudeBits(ClampOrZero(x[i], kMax)));
    bool saturated = false;  // cannot happen: x is clamped
    const uint16_t scale_bits = RoundScale(std::bit_cast<float>(magnitude) / kMaxCode, saturated);
    StoreBytes(out.token_scales, scale_bits);
    uint8_t* __restrict codes = out.codes;  // a byte pointer may alias anything, and the loop would stay scalar
    // A scale of zero (a zero row, or one below fp16's smallest) has zero codes.
    const float scale = scale_bits == 0 ? std::numeric_limits<float>::infinity() : Fp16ToFloat(scale_bits);
    constexpr float kTop = kMaxCode;  // a GPU has no address of a member
    for (int i = 0; i < head_dim; ++i) {
      const float code = std::max(-kTop, std::min(kTop, ClampOrZero(x[i], kMax) / scale));
      codes[i] = static_cast<uint8_t>(RoundToInt(code));
    }
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    const float scale = Fp16ToFloat(LoadBytes<uint16_t>(in.token_scales));
    for (int i = 0; i < head_dim; ++i) x[i] = scale * static_cast<float>(static_cast<int8_t>(in.codes[i]));
  }
};

}  // namespace kvanta::formats
