// int6_g32: 6-bit codes in blocks of 32 channels (formats/signed_block.h).
#pragma once

#include "formats/signed_block.h"

namespace kvanta::formats {

struct Int6Block : SignedBlock<ElementType::kInt6> {
  static constexpr std::string_view kName = "int6_g32";
  static constexpr std::string_view kSummary =
      "6-bit integers, fp16 least-squares scale per 32 channels, hadamard, open page exact";
};

}  // namespace kvanta::formats
