// kivi4: keys per channel over 32 tokens of a page, values per token in groups of 32 channels, both asymmetric (KIVI,
// Liu et al. 2024). A key channel's offset holds its bias, so that large biased channels cost nothing.
#pragma once

#include "formats/unsigned_group.h"

namespace kvanta::formats {

struct Kivi4Values : UnsignedBlock<ElementType::kUint4> {
  static constexpr std::string_view kName = "kivi4";
  static constexpr std::string_view kSummary = "V of kivi4: per token, groups of 32 channels";
};

struct Kivi4 : UnsignedTokenGroup<ElementType::kUint4> {
  static constexpr std::string_view kName = "kivi4";
  static constexpr std::string_view kSummary =
      "4-bit unsigned integers, fp16 scale and zero: K per channel and 32 tokens, V per 32 channels of a token; open "
      "and first page exact";
  using Values = Kivi4Values;
};

}  // namespace kvanta::formats
