// Weights in blocks of 32 along a row of W: a scale, optionally an offset, and a code of 8 or 4 bits each. Read from
// blocks of the formats Q8_0, Q4_0 and Q4_1 (block_format.h), or quantized here.
#pragma once

#include <cstdint>

#include "weights/block_format.h"

namespace kvanta::weights {

inline constexpr int kBlockWeights = 32;

// One block, unpacked: weight i is scale * codes[i] + offset.
struct WeightBlock {
  uint16_t scale = 0;   // fp16
  uint16_t offset = 0;  // fp16
  int8_t codes[kBlockWeights] = {};
};

// bytes: BlockBytes(format) of Q8_0, Q4_0 or Q4_1.
WeightBlock ReadBlock(const uint8_t* bytes, BlockFormat format) noexcept;
// out: f32 [32].
void DequantizeBlock(const WeightBlock& block, float* out) noexcept;

// Quantizes n <= 32 finite values; the rest of the block counts as zeros. Int8: scale max|x| / 127, no offset, codes
// rounded to the nearest. Int4: codes 0 to 15 with an offset, the least squared error among several ranges. A scale or
// offset that fp16 cannot represent becomes infinite.
WeightBlock QuantizeInt8(const float* x, int n) noexcept;
WeightBlock QuantizeInt4(const float* x, int n) noexcept;

}  // namespace kvanta::weights
