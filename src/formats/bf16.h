// bf16: bfloat16, converted by value. Also the code of exact pages.
#pragma once

#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/rounding.h"

namespace kvanta::formats {

struct Bf16 : FormatTraits {
  static constexpr std::string_view kName = "bf16";
  static constexpr std::array<std::string_view, 1> kAliases = {"bfloat16"};
  static constexpr std::string_view kSummary = "bfloat16, converted by value";
  static constexpr std::string_view kRule = "code = bf16(x), nearest even; above 3.39e38 saturates";
  static constexpr ElementType kElementType = ElementType::kBf16;
  static constexpr MlaSupport kMlaSupport = MlaSupport::kYes;
  static constexpr uint16_t kMaxBits = 0x7f7f;

  // The nearest bf16; above the largest finite value that one; NaN stays NaN.
  KVANTA_HD static uint16_t Encode(float x) noexcept {
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffffU;
    const uint32_t rounded = (magnitude + 0x7fffU + ((magnitude >> 16U) & 1U)) >> 16U;
    const uint32_t finite = std::min(rounded, uint32_t{kMaxBits});
    const uint32_t nan = (magnitude >> 16U) | 0x40U;
    return static_cast<uint16_t>(((bits >> 16U) & 0x8000U) | (magnitude > 0x7f800000U ? nan : finite));
  }

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    CountRow(x, head_dim, Bf16ToFloat(kMaxBits), counts);
    for (int i = 0; i < head_dim; ++i) StoreBytes(out.codes + 2 * i, Encode(x[i]));
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    for (int i = 0; i < head_dim; ++i) x[i] = Bf16ToFloat(LoadBytes<uint16_t>(in.codes + 2 * i));
  }
};

}  // namespace kvanta::formats
