// fp16: IEEE 754 binary16, converted by value (never a reinterpretation of a bf16 model's bits).
#pragma once

#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/rounding.h"

namespace kvanta::formats {

struct Fp16 : FormatTraits {
  static constexpr std::string_view kName = "fp16";
  static constexpr std::array<std::string_view, 3> kAliases = {"float16", "half", "f16"};
  static constexpr std::string_view kSummary = "IEEE half precision, converted by value";
  static constexpr std::string_view kRule = "code = fp16(x), nearest even; above 65504 saturates";
  static constexpr ElementType kElementType = ElementType::kFp16;
  static constexpr MlaSupport kMlaSupport = MlaSupport::kYes;

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    CountRow(x, head_dim, kFp16Max, counts);
    for (int i = 0; i < head_dim; ++i) {
      const uint16_t rounded = FloatToFp16(x[i]);
      const bool infinite = (rounded & 0x7fffU) == 0x7c00U;
      StoreBytes(out.codes + 2 * i, static_cast<uint16_t>(infinite ? rounded - 1U : rounded));
    }
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    for (int i = 0; i < head_dim; ++i) x[i] = Fp16ToFloat(LoadBytes<uint16_t>(in.codes + 2 * i));
  }
};

}  // namespace kvanta::formats
