// fp32: the value itself; what `auto` means for a model that computes in float32.
#pragma once

#include <limits>

#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/rounding.h"

namespace kvanta::formats {

struct Fp32 : FormatTraits {
  static constexpr std::string_view kName = "fp32";
  static constexpr std::array<std::string_view, 2> kAliases = {"float32", "f32"};
  static constexpr std::string_view kSummary = "32-bit float, the value itself";
  static constexpr std::string_view kRule = "code = x; infinities become the largest finite value";
  static constexpr ElementType kElementType = ElementType::kFp32;
  static constexpr MlaSupport kMlaSupport = MlaSupport::kYes;
  static constexpr float kMax = std::numeric_limits<float>::max();

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    CountRow(x, head_dim, kMax, counts);
    for (int i = 0; i < head_dim; ++i) {
      const int32_t magnitude = MagnitudeBits(x[i]);
      const int32_t sign = std::bit_cast<int32_t>(x[i]) ^ magnitude;
      StoreBytes(out.codes + 4 * i, sign | (magnitude == kInfinityBits ? std::bit_cast<int32_t>(kMax) : magnitude));
    }
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    for (int i = 0; i < head_dim; ++i) x[i] = LoadBytes<float>(in.codes + 4 * i);
  }
};

}  // namespace kvanta::formats
