// fp8_e4m3: OCP E4M3, one static scale per KV head (or one for all of them).
#pragma once

#include "formats/format_traits.h"
#include "formats/minifloat.h"

namespace kvanta::formats {

struct Fp8E4m3 : FormatTraits {
  static constexpr std::string_view kName = "fp8_e4m3";
  static constexpr std::string_view kLatentFormat = "mla_fp8";
  static constexpr std::array<std::string_view, 1> kAliases = {"fp8"};
  static constexpr std::string_view kSummary = "8-bit float, 4 exponent and 3 mantissa bits, largest 448; static scale";
  static constexpr std::string_view kRule =
      "code = e4m3(x / s), s the head's static scale (1.0 if none was given); above 448 saturates";
  static constexpr ElementType kElementType = ElementType::kE4M3;
  static constexpr Scaling kScaling = {.per_head = true};

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                                  EncodeCounts& counts) noexcept {
    EncodeMinifloatRow<E4m3>(x, head_dim, head.static_scale, out.codes, counts);
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters head, float* x) noexcept {
    DecodeMinifloatRow<E4m3>(in.codes, head_dim, head.static_scale, x);
  }
};

}  // namespace kvanta::formats
