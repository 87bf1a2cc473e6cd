// What attention's kernels are made of: what formats' scales are to them, a tile's state, a chunk's view. A unit that
// includes this has included the primitives.
#pragma once

#include <limits>
#include <type_traits>

#include "formats/format_traits.h"
#include "kernels/cuda/queries.h"

namespace kvanta::kernels::cuda {

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// What a format's scales are to its products.
enum class ScaleUse : uint8_t {
  kNone,     // a static one, which goes into the row's, or none
  kToken,    // fp16, one for each token: into logits, and into weights
  kBlock32,  // fp16, one for 32 channels of a token: into a block's dots, and into weights
  kBlock16,  // E4M3, one for 16 channels of a token: into the operands, exactly
};

template <class Format>
struct SideTraits {
  static constexpr Code kCode = Format::kCode;
  static constexpr formats::Scaling kScaling = Format::kScaling;
  static constexpr ScaleUse kScale = kScaling.block == formats::ScaleType::kE4M3   ? ScaleUse::kBlock16
                                     : kScaling.block == formats::ScaleType::kFp16 ? ScaleUse::kBlock32
                                     : kScaling.token == formats::ScaleType::kFp16 ? ScaleUse::kToken
                                                                                   : ScaleUse::kNone;
  static_assert(kScale != ScaleUse::kBlock16 || kScaling.channels == 16);
  static_assert(kScale != ScaleUse::kBlock32 || (kScaling.channels == 32 && formats::CodeBits(kCode) == 4));
  static_assert(!kScaling.block_zero && !kScaling.token_zero && kScaling.tile == 0);
};

// E4M3 scales as f16 operands are 2^7 too large, so that with E2M1's 2^-14 a product is exact and none overflows.
inline constexpr float kBlock16Unit = 0x1p-7F;
inline constexpr uint32_t kTwoToThe7 = 0x58005800U;

template <class Side>
constexpr float OperandUnit() {
  return CodeOperand<Side::kCode>::kUnit * (Side::kScale == ScaleUse::kBlock16 ? kBlock16Unit : 1.0F);
}

template <bool kBf16>
KVANTA_DEVICE void Mma(float (&c)[4], const Words4& a, uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    MmaBf16(c, a, b0, b1);
  } else {
    MmaF16(c, a, b0, b1);
  }
}

// 8 fp16 numbers, aligned to 16 bytes.
KVANTA_DEVICE void LoadHalves(const uint8_t* from, float (&values)[8]) {
  const Words4 words = LoadWords4(from);
  KVANTA_UNROLL
  for (int i = 0; i < 8; ++i) values[i] = F16ToFloat(static_cast<uint16_t>(words.word[i / 2] >> (16U * (i % 2U))));
}

// A lane's part of a tile over some tokens: rows g and g + 8 (index 0 and 1).
template <int kDim>
struct TileState {
  static constexpr int kBlocks = (kDim + 31) / 32;
  float out[4 * kBlocks][4];  // tile i of block b: channels 32 b + 8 t + i and + 4 + i, rows g and g + 8
  float peak[2];              // of logits, in powers of 2
  float sum[2];               // this lane's tokens' weights
  int exponent[2];            // `out` is in units of 2^(exponent - kTopExponent)
};

// Below any fp16 scale. bf16 values are multiplied by weights as they are: a cell of them has no scale to follow, and
// beside other cells it takes their exponent.
inline constexpr int kLeastExponent = -40;

// A chunk as a tile sees it.
struct ChunkView {
  const uint8_t* keys = nullptr;  // cells
  const uint8_t* values = nullptr;
  int slot = 0;  // of its first token in the page
  int begin[2];  // tokens of the chunk that rows g and g + 8 see: [begin, end)
  int end[2];
  bool whole = false;  // all rows see all of it
};

}  // namespace kvanta::kernels::cuda
