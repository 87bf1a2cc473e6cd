// int4_per_token_head: asymmetric 4-bit codes, one scale and one offset per (token, head), after a Hadamard transform.
#pragma once

#include "formats/unsigned_group.h"

namespace kvanta::formats {

struct Int4PerTokenHead : UnsignedRow<ElementType::kUint4> {
  static constexpr std::string_view kName = "int4_per_token_head";
  static constexpr std::string_view kSummary =
      "4-bit unsigned integers, fp16 scale and zero per (token, head), hadamard, open and first page exact";
  static constexpr bool kHadamard = true;
  static constexpr ExactPages kExact = ExactPages::kOpen;
  static constexpr int kSinkPages = 1;
};

}  // namespace kvanta::formats
