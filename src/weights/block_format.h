// Formats of weights in blocks along a row of W, as GGUF files store them (https://github.com/ggml-org/ggml,
// ggml-common.h): a block has one or two scales, often scaled again for each 16 or 32 weights, and a code per weight.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace kvanta::weights {

// NOLINTBEGIN(readability-identifier-naming): GGUF's names
enum class BlockFormat : uint8_t {
  kNone,  // elements
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_NL,
  kIQ4_XS,
  kMXFP4,
  kNVFP4,
};
// NOLINTEND(readability-identifier-naming)
inline constexpr int kBlockFormats = static_cast<int>(BlockFormat::kNVFP4) + 1;

inline constexpr int kMaxBlockWeights = 256;
inline constexpr int kSubBlockWeights = 16;  // consecutive weights that share all scales, in every format

// One block, unpacked: weight i is scale * sub_scales[i / 16] * codes[i] + offset * sub_offsets[i / 16], exact in f32
// but for the sum.
struct UnpackedBlock {
  float scale = 0;
  float offset = 0;
  float sub_scales[kMaxBlockWeights / kSubBlockWeights] = {};
  float sub_offsets[kMaxBlockWeights / kSubBlockWeights] = {};
  int8_t codes[kMaxBlockWeights] = {};
};

struct BlockFormatInfo {
  std::string_view name;  // "Q4_K"
  int weights = 0;        // per block
  int bytes = 0;          // per block
  void (*unpack)(const uint8_t* bytes, UnpackedBlock& block) noexcept = nullptr;
};

// kNone: "none", one weight, no bytes, no function.
const BlockFormatInfo& Info(BlockFormat format) noexcept;
// The format of that name, or kNone.
BlockFormat FindBlockFormat(std::string_view name) noexcept;

inline std::string_view Name(BlockFormat format) noexcept {
  return Info(format).name;
}
inline int BlockBytes(BlockFormat format) noexcept {
  return Info(format).bytes;
}
inline int BlockWeights(BlockFormat format) noexcept {
  return Info(format).weights;
}
// Formats so coarse that a model in them amplifies the rounding of 8-bit activations: the mean KL divergence from bf16
// activations passes .002 unless the layer with the widest range of inputs takes 16 bits (docs/weights.md).
constexpr bool AmplifiesRounding(BlockFormat format) noexcept {
  return format == BlockFormat::kQ2_K || format == BlockFormat::kQ3_K || format == BlockFormat::kMXFP4;
}
// Bytes of a row of `in` weights, a multiple of BlockWeights(format).
inline int64_t RowBytes(BlockFormat format, int64_t in) noexcept {
  return in / BlockWeights(format) * BlockBytes(format);
}

// Values of a row of blocks, f32 [in].
void DequantizeBlocks(const uint8_t* row, BlockFormat format, int64_t in, float* out) noexcept;

// Values of the codes of IQ4_NL and IQ4_XS; of MXFP4 and NVFP4 (E2M1), doubled.
inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t kE2m1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace kvanta::weights
