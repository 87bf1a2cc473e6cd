// Packs single pairs of channels for bf16 weights, whose operands need no scale of the whole row: by kernels whose
// blocks have a part of a row each. Include the primitives first.
#pragma once

#include "kernels/linear/cuda/packed_rows.h"

namespace kvanta::kernels::cuda {

// Stores channels k and k + 1 of a row of `units` whole units, k even, as PackRow does (pack_kernel.h). The pair of
// channel 0 writes the row's factor.
KVANTA_DEVICE void StorePackedPair(const PackedRows& out, int64_t row, int64_t units, int64_t k, float even,
                                   float odd) {
  const int64_t unit = row / kRowTile * units + k / kPanelChannels;
  const auto lane = static_cast<int>(row % kRowTile * 4 + k % 8 / 2);
  uint8_t* const to = out.codes + (unit * kWarp + lane) * 16 + k % kPanelChannels / 8 * 4;
  *reinterpret_cast<uint32_t*>(to) = PackBf16(even, odd);
  if (k == 0) out.factors[row] = 1;
}

}  // namespace kvanta::kernels::cuda
