// The formats of latents (MLA): one row per token is both key and value, stored once and not rotated; the rotated part
// of the key is stored after it in bf16 (formats/scheme.h).
#pragma once

#include "formats/int8_g32.h"
#include "formats/minifloat.h"
#include "formats/nvfp4.h"
#include "formats/signed_block.h"

namespace kvanta::formats {

// Floats of 8 bits, one f32 scale per 128 channels.
template <class Float>
struct MlaFloat8 : FormatTraits {
  static constexpr int kBlock = 128;
  static constexpr Scaling kScaling = {.block = ScaleType::kF32, .channels = kBlock, .allow_partial_block = true};
  static constexpr MlaSupport kMlaSupport = MlaSupport::kRequired;

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters /*head*/, RowSections out,
                                  EncodeCounts& counts) noexcept {
    const int block = head_dim < kBlock ? head_dim : kBlock;
    for (int begin = 0; begin < head_dim; begin += block) {
      StoreBytes(out.block_scales + begin / block * 4,
                 EncodeMinifloatRun<Float>(x + begin, block, out.codes + begin, counts));
    }
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    const int block = head_dim < kBlock ? head_dim : kBlock;
    for (int begin = 0; begin < head_dim; begin += block) {
      const float scale = LoadBytes<float>(in.block_scales + begin / block * 4);
      DecodeMinifloatRow<Float>(in.codes + begin, block, scale, x + begin);
    }
  }
};

// 656 bytes per token at rank 512 and 64 rotated channels: 512 codes, 4 scales, 128 bytes of bf16.
struct MlaFp8 : MlaFloat8<E4m3> {
  static constexpr std::string_view kName = "mla_fp8";
  static constexpr std::array<std::string_view, 1> kAliases = {"fp8_ds_mla"};
  static constexpr std::string_view kSummary =
      "latents of MLA: 8-bit float E4M3, f32 scale per 128 channels; rotated part in bf16";
  static constexpr std::string_view kRule =
      "s = f32(amax / 448) of 128 channels, or of the row where it has fewer; code = e4m3(x / s)";
  static constexpr ElementType kElementType = ElementType::kE4M3;
};

struct MlaFp8E5m2 : MlaFloat8<E5m2> {
  static constexpr std::string_view kName = "mla_fp8_e5m2";
  static constexpr std::string_view kSummary =
      "latents of MLA: 8-bit float E5M2, f32 scale per 128 channels; rotated part in bf16";
  static constexpr std::string_view kRule =
      "s = f32(amax / 57344) of 128 channels, or of the row where it has fewer; code = e5m2(x / s)";
  static constexpr ElementType kElementType = ElementType::kE5M2;
};

struct MlaInt8 : Int8Block {
  static constexpr std::string_view kName = "mla_int8";
  static constexpr std::string_view kSummary = "latents of MLA: int8_g32 without hadamard; rotated part in bf16";
  static constexpr bool kHadamard = false;
  static constexpr MlaSupport kMlaSupport = MlaSupport::kRequired;
};

struct MlaInt4 : SignedBlock<ElementType::kInt4> {
  static constexpr std::string_view kName = "mla_int4";
  static constexpr std::string_view kSummary =
      "latents of MLA: int4 without hadamard; rotated part in bf16; open and first page exact";
  static constexpr bool kHadamard = false;
  static constexpr int kSinkPages = 1;
  static constexpr MlaSupport kMlaSupport = MlaSupport::kRequired;
};

// Without nvfp4's static scale: a norm's output is in range.
struct MlaNvfp4Rule : Nvfp4Rule {
  static constexpr bool kPerHead = false;
};

struct MlaNvfp4 : FloatBlock<MlaNvfp4Rule> {
  static constexpr std::string_view kName = "mla_nvfp4";
  static constexpr std::string_view kSummary =
      "latents of MLA: E2M1, E4M3 scale per 16 channels; rotated part in bf16; open and first page exact";
  static constexpr std::string_view kRule = "s = e4m3(amax(x) / 6) of 16 channels; code = e2m1(x / s)";
  static constexpr MlaSupport kMlaSupport = MlaSupport::kRequired;
};

}  // namespace kvanta::formats
