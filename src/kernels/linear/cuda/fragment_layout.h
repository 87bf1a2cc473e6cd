// Layout of packed weights on a GPU: [panels][units][codes | scales]. A panel is 16 rows of W, a unit 32 of their
// channels: the A operands of two 16 x 16 products in mma.m16n8k16's fragment order. A lane takes one or two loads of 8
// to 16 bytes, and a warp's loads are contiguous.
//
//   lane 4 g + t   has rows g and g + 8, channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16
//   16 bits        [2 steps of 16 channels][32 lanes][4 registers of 2]
//   8 bits         [32 lanes][2 steps][row g, row g + 8][4 channels], code + 128 | fp16 scales [8][g, g + 8]
//   4 bits         [32 lanes][2 steps] words of 8 codes, register r's two at bits 4 r and 4 r + 16
//                  | [8] fp16 scale of g, g + 8, minimum of g, g + 8
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/cuda/model_ops.h"

namespace kvanta::kernels::cuda {

inline constexpr int kPanelMultiple = 8;  // panel count padding: the maximum per block

struct UnitBytes {
  int codes = 0;
  int total = 0;
};

KVANTA_HD constexpr UnitBytes UnitBytesOf(PanelKind kind) {
  constexpr int kCount = kPanelRows * kPanelChannels;
  if (kind == PanelKind::kInt8) return {kCount, kCount + 2 * kPanelRows};
  if (kind == PanelKind::kInt4) return {kCount / 2, kCount / 2 + 4 * kPanelRows};
  return {2 * kCount, 2 * kCount};
}

// Position of a value in a unit: first byte, and first bit in it.
struct FragmentOffset {
  int byte = 0;
  int bit = 0;
};

KVANTA_HD constexpr FragmentOffset FragmentOffsetOf(PanelKind kind, int row, int channel) {
  const int high_row = row / 8;
  const int step = channel / 16;
  const int high_half = channel % 16 / 8;
  const int odd = channel % 2;
  const int lane = row % 8 * 4 + channel % 8 / 2;
  const int reg = high_row + 2 * high_half;
  if (kind == PanelKind::kInt8) return {lane * 16 + (2 * step + high_row) * 4 + 2 * high_half + odd, 0};
  if (kind == PanelKind::kInt4) {
    const int bit = 4 * reg + 16 * odd;
    return {lane * 8 + step * 4 + bit / 8, bit % 8};
  }
  return {step * 512 + lane * 16 + reg * 4 + odd * 2, 0};
}

// Byte offset of a row's fp16 scale in a unit; its minimum is 4 bytes later.
KVANTA_HD constexpr int ScaleOffset(PanelKind kind, int row) {
  const int stride = kind == PanelKind::kInt8 ? 4 : 8;
  return UnitBytesOf(kind).codes + row % 8 * stride + row / 8 * 2;
}

}  // namespace kvanta::kernels::cuda
