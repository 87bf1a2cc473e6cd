// int4: 4-bit codes in blocks of 32 channels (formats/signed_block.h).
#pragma once

#include "formats/signed_block.h"

namespace kvanta::formats {

struct Int4 : SignedBlock<ElementType::kInt4> {
  static constexpr std::string_view kName = "int4";
  static constexpr std::string_view kLatentFormat = "mla_int4";
  static constexpr std::array<std::string_view, 1> kAliases = {"int4_g32"};
  static constexpr std::string_view kSummary =
      "4-bit integers, fp16 least-squares scale per 32 channels, hadamard, open and first page exact";
  static constexpr int kSinkPages = 1;
};

}  // namespace kvanta::formats
