// nvfp4: E2M1 in blocks of 16 channels with an E4M3 scale each, and one static f32 scale per KV head (of a checkpoint:
// amax / (6 * 448)). nvfp4_4over6 tries amax / 4 as well as amax / 6 and keeps the one with the smaller error: 4 as the
// largest level has closer neighbours than 6 ("Four Over Six", Cook et al. 2025).
#pragma once

#include "formats/float_block.h"

namespace kvanta::formats {

struct Nvfp4Rule {
  static constexpr ElementType kElementType = ElementType::kE2M1;
  static constexpr int kBlock = 16;
  static constexpr bool kPerHead = true;
  static constexpr ScaleType kScaleType = ScaleType::kE4M3;
  static constexpr float kMax = E2m1::kMax * E4m3::kMax;

  KVANTA_HD static uint8_t Encode(const float* x, float amax, uint8_t* fields) noexcept {
    const uint8_t scale = E4m3::Encode(amax / E2m1::kMax);
    EncodeFields<E2m1>(x, kBlock, E4m3::Decode(scale), fields);
    return scale;
  }
};

struct FourOverSixRule : Nvfp4Rule {
  KVANTA_HD static uint8_t Encode(const float* x, float amax, uint8_t* fields) noexcept {
    uint8_t other[kBlock];
    const uint8_t six = Nvfp4Rule::Encode(x, amax, fields);
    const uint8_t four = E4m3::Encode(amax / 4.0F);
    EncodeFields<E2m1>(x, kBlock, E4m3::Decode(four), other);
    if (!(Error(x, E4m3::Decode(four), other) < Error(x, E4m3::Decode(six), fields))) return six;
    for (int i = 0; i < kBlock; ++i) fields[i] = other[i];  // std::copy_n copies nothing in device code (nvcc 13.0)
    return four;
  }

 private:
  KVANTA_HD static float Error(const float* x, float scale, const uint8_t* fields) noexcept {
    float sum = 0.0F;  // in channel order: the order is part of the format
    for (int i = 0; i < kBlock; ++i) {
      const float difference = x[i] - E2m1::Decode(fields[i]) * scale;
      sum += difference * difference;
    }
    return sum;
  }
};

struct Nvfp4 : FloatBlock<Nvfp4Rule> {
  static constexpr std::string_view kName = "nvfp4";
  static constexpr std::string_view kLatentFormat = "mla_nvfp4";
  static constexpr std::string_view kSummary =
      "4-bit float E2M1, E4M3 scale per 16 channels, static f32 scale; open and first page exact";
  static constexpr std::string_view kRule =
      "y = x / s_head (1.0 if none was given); s = e4m3(amax(y) / 6) of 16 channels; code = e2m1(y / s)";
};

struct Nvfp4FourOverSix : FloatBlock<FourOverSixRule> {
  static constexpr std::string_view kName = "nvfp4_4over6";
  static constexpr std::string_view kSummary =
      "nvfp4 whose block scale is amax / 6 or amax / 4, whichever errs less; the same bytes to a reader";
  static constexpr std::string_view kRule =
      "y = x / s_head; s = e4m3(amax(y) / 6), or e4m3(amax(y) / 4) where its squared error is less; code = e2m1(y / s)";
};

}  // namespace kvanta::formats
