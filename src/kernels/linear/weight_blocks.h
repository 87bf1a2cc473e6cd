// Weights in blocks of 32 along a row of W: a scale, optionally an offset, and a code of 8 or 4 bits each. Read from
// GGUF files (https://github.com/ggml-org/ggml, ggml-common.h: block_q8_0, block_q4_0, block_q4_1), or quantized here.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvanta::kernels {

inline constexpr int kBlockWeights = 32;

// NOLINTBEGIN(readability-identifier-naming): GGUF's names
enum class BlockFormat : uint8_t {
  kNone,  // elements
  kQ8_0,  // fp16 scale | int8 [32]
  kQ4_0,  // fp16 scale | u4 [32], code - 8; byte i holds the weights i and i + 16, low half first
  kQ4_1,  // fp16 scale | fp16 offset | u4 [32] as in Q4_0, code
};
// NOLINTEND(readability-identifier-naming)

// One block, unpacked: weight i is scale * codes[i] + offset.
struct WeightBlock {
  uint16_t scale = 0;   // fp16
  uint16_t offset = 0;  // fp16
  int8_t codes[kBlockWeights] = {};
};

// Bytes of a block in a file; 0 for kNone.
int BlockBytes(BlockFormat format) noexcept;
// "Q8_0", ... or "none".
std::string_view Name(BlockFormat format) noexcept;

// bytes: BlockBytes(format).
WeightBlock ReadBlock(const uint8_t* bytes, BlockFormat format) noexcept;
// out: f32 [32].
void BlockValues(const WeightBlock& block, float* out) noexcept;

// Quantizes n <= 32 finite values; the rest of the block counts as zeros. Int8: scale max|x| / 127, no offset, codes
// rounded to the nearest. Int4: codes 0 to 15 with an offset, the least squared error among several ranges. A scale or
// offset that fp16 cannot represent becomes infinite.
WeightBlock QuantizeInt8(const float* x, int n) noexcept;
WeightBlock QuantizeInt4(const float* x, int n) noexcept;

}  // namespace kvanta::kernels
