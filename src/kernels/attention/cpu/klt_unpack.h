// Decoding of keys with uneven bits token by token, for units without a byte look-up of 256 entries.
#pragma once

#include <cstdint>

#include "formats/klt.h"

namespace kvanta::kernels {
namespace {

struct KltKeys {
  const formats::BlockBits& allocation;

  // Decodes a group of 16 tokens to the order of int8 keys: [head_dim / 4][16 tokens][4].
  void Unpack(const uint8_t* group, uint8_t* out) const {
    const int head_dim = allocation.head_dim;
    int row_bytes = 0;
    for (int block = 0; block < allocation.coded_blocks; ++block) row_bytes += allocation.bits[block];
    for (int token = 0; token < 16; ++token) {
      uint8_t codes[formats::kMaxHeadDim];
      int8_t levels[formats::kMaxHeadDim];
      for (int byte = 0; byte < row_bytes; byte += 4) __builtin_memcpy(codes + byte, group + byte * 16 + token * 4, 4);
      formats::KltLevelsOf(allocation, codes, levels);
      for (int c = 0; c < head_dim; c += 4) __builtin_memcpy(out + c * 16 + token * 4, levels + c, 4);
    }
  }
};

}  // namespace
}  // namespace kvanta::kernels
