// int5_g32: 5-bit codes in blocks of 32 channels (formats/signed_block.h).
#pragma once

#include "formats/signed_block.h"

namespace kvanta::formats {

struct Int5Block : SignedBlock<ElementType::kInt5> {
  static constexpr std::string_view kName = "int5_g32";
  static constexpr std::string_view kSummary =
      "5-bit integers, fp16 least-squares scale per 32 channels, hadamard, open page exact";
};

}  // namespace kvanta::formats
