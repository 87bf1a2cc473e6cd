// fp8_e5m2: OCP E5M2, one static scale per KV head (or one for all of them).
#pragma once

#include "formats/format_traits.h"
#include "formats/minifloat.h"

namespace kvanta::formats {

struct Fp8E5m2 : FormatTraits {
  static constexpr std::string_view kName = "fp8_e5m2";
  static constexpr std::string_view kLatentFormat = "mla_fp8_e5m2";
  static constexpr std::string_view kSummary =
      "8-bit float, 5 exponent and 2 mantissa bits, largest 57344; static scale";
  static constexpr std::string_view kRule =
      "code = e5m2(x / s), s the head's static scale (1.0 if none was given); above 57344 saturates";
  static constexpr ElementType kElementType = ElementType::kE5M2;
  static constexpr Scaling kScaling = {.per_head = true};

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                                  EncodeCounts& counts) noexcept {
    EncodeMinifloatRow<E5m2>(x, head_dim, head.static_scale, out.codes, counts);
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters head, float* x) noexcept {
    DecodeMinifloatRow<E5m2>(in.codes, head_dim, head.static_scale, x);
  }
};

}  // namespace kvanta::formats
