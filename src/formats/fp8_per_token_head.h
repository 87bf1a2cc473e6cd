// fp8_per_token_head: OCP E4M3 with one f32 scale per (token, head).
#pragma once

#include <limits>

#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/minifloat.h"

namespace kvanta::formats {

struct Fp8PerTokenHead : FormatTraits {
  static constexpr std::string_view kName = "fp8_per_token_head";
  static constexpr std::string_view kSummary = "8-bit float E4M3, f32 scale per (token, head)";
  static constexpr std::string_view kRule = "s = f32(amax / 448); code = e4m3(x / s)";
  static constexpr Code kCode = Code::kE4M3;
  static constexpr Scaling kScaling = {.token = ScaleType::kF32};

  static void EncodeRow(const float* x, int head_dim, float /*static_scale*/, RowPlanes out,
                        EncodeCounts& counts) noexcept {
    constexpr float kLimit = std::numeric_limits<float>::max();
    CountRow(x, head_dim, kLimit, counts);
    int32_t magnitude = 0;
    for (int i = 0; i < head_dim; ++i) magnitude = std::max(magnitude, MagnitudeBits(ClampOrZero(x[i], kLimit)));
    const float scale = std::bit_cast<float>(magnitude) / E4m3::kMax;
    StoreBytes(out.token_scales, scale);
    // A scale of zero (a zero row, or one of the least subnormals) has zero codes. NaN stays NaN.
    const float divisor = scale == 0.0F ? std::numeric_limits<float>::infinity() : scale;
    for (int i = 0; i < head_dim; ++i) {
      const float value = MagnitudeBits(x[i]) > kInfinityBits ? x[i] : ClampOrZero(x[i], kLimit);
      out.codes[i] = E4m3::Encode(value / divisor);
    }
  }

  static void DecodeRow(ConstRowPlanes in, int head_dim, float /*static_scale*/, float* x) noexcept {
    DecodeMinifloatRow<E4m3>(in.codes, head_dim, LoadBytes<float>(in.token_scales), x);
  }
};

}  // namespace kvanta::formats
