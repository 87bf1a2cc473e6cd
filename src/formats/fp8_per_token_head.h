// fp8_per_token_head: OCP E4M3 with one f32 scale per (token, head).
#pragma once

#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/minifloat.h"

namespace kvanta::formats {

struct Fp8PerTokenHead : FormatTraits {
  static constexpr std::string_view kName = "fp8_per_token_head";
  static constexpr std::string_view kSummary = "8-bit float E4M3, f32 scale per (token, head)";
  static constexpr std::string_view kRule = "s = f32(amax / 448); code = e4m3(x / s)";
  static constexpr ElementType kElementType = ElementType::kE4M3;
  static constexpr Scaling kScaling = {.token = ScaleType::kF32};

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    StoreBytes(out.token_scales, EncodeMinifloatRun<E4m3>(x, head_dim, out.codes, counts));
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    DecodeMinifloatRow<E4m3>(in.codes, head_dim, LoadBytes<float>(in.token_scales), x);
  }
};

}  // namespace kvanta::formats
