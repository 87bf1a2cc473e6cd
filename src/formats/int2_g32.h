// int2_g32: 2-bit codes in blocks of 32 channels (formats/signed_block.h).
#pragma once

#include "formats/signed_block.h"

namespace kvanta::formats {

struct Int2Block : SignedBlock<ElementType::kInt2> {
  static constexpr std::string_view kName = "int2_g32";
  static constexpr std::string_view kSummary =
      "2-bit integers, fp16 least-squares scale per 32 channels, hadamard, open and first page exact";
  static constexpr int kSinkPages = 1;
};

}  // namespace kvanta::formats
