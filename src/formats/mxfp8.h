// mxfp8: OCP E4M3 in blocks of 32 channels with a power of two as scale (OCP Microscaling Formats, revision 1.0).
#pragma once

#include "formats/float_block.h"

namespace kvanta::formats {

struct Mxfp8 : FormatTraits {
  static constexpr std::string_view kName = "mxfp8";
  static constexpr std::string_view kSummary = "8-bit float E4M3, power-of-two scale per 32 channels (OCP)";
  static constexpr std::string_view kRule = "s = 2^(floor(log2(amax)) - 8) of 32 channels; code = e4m3(x / s)";
  static constexpr ElementType kElementType = ElementType::kE4M3;
  static constexpr int kBlock = 32;
  static constexpr Scaling kScaling = {.block = ScaleType::kE8M0, .channels = kBlock};

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    constexpr float kLimit = E4m3::kMax * 0x1p119F;  // a larger scale would not fit f32
    CountRow(x, head_dim, kLimit, counts);
    for (int begin = 0; begin < head_dim; begin += kBlock) {
      int32_t magnitude = 0;
      for (int i = begin; i < begin + kBlock; ++i) {
        magnitude = std::max(magnitude, MagnitudeBits(ClampOrZero(x[i], kLimit)));
      }
      const uint8_t byte = magnitude == 0 ? uint8_t{0} : ExponentByte(FloorLog2(std::bit_cast<float>(magnitude)) - 8);
      out.block_scales[begin / kBlock] = byte;
      for (int i = begin; i < begin + kBlock; ++i) out.codes[i] = E4m3::Encode(x[i] / E8m0::Decode(byte));
    }
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    for (int i = 0; i < head_dim; ++i) x[i] = E4m3::Decode(in.codes[i]) * E8m0::Decode(in.block_scales[i / kBlock]);
  }
};

}  // namespace kvanta::formats
