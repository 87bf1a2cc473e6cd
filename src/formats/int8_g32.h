// int8_g32: codes -127..127 in blocks of 32 channels with one fp16 scale each, after a Hadamard transform; the rule of
// int8, per block.
#pragma once

#include "formats/int8.h"

namespace kvanta::formats {

struct Int8Block : FormatTraits {
  static constexpr std::string_view kName = "int8_g32";
  static constexpr std::string_view kSummary = "8-bit integers, fp16 scale per 32 channels, hadamard";
  static constexpr std::string_view kRule = Int8::kRule;
  static constexpr ElementType kElementType = ElementType::kInt8;
  static constexpr int kBlock = 32;
  static constexpr Scaling kScaling = {.block = ScaleType::kFp16, .channels = kBlock};
  static constexpr bool kHadamard = true;

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                                  EncodeCounts& counts) noexcept {
    for (int begin = 0; begin < head_dim; begin += kBlock) {
      Int8::EncodeRow(x + begin, kBlock, head.static_scale,
                      {.codes = out.codes + begin, .token_scales = out.block_scales + begin / kBlock * 2}, counts);
    }
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters head, float* x) noexcept {
    for (int begin = 0; begin < head_dim; begin += kBlock) {
      Int8::DecodeRow({.codes = in.codes + begin, .token_scales = in.block_scales + begin / kBlock * 2}, kBlock,
                      head.static_scale, x + begin);
    }
  }
};

}  // namespace kvanta::formats
