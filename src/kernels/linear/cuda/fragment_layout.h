// Where a weight's values lie on a GPU. A panel has 16 rows of W, a unit of it 32 channels: the A operands of two
// products of 16 x 16, in the order in which mma.m16n8k16 wants them, so that a lane loads its part with one or two
// loads of 8 to 16 bytes, and a warp's loads are one piece. [panels][units][codes | scales].
//
//   lane 4 g + t   has rows g and g + 8, channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16
//   16 bits        [2 steps of 16 channels][32 lanes][4 registers of 2]
//   8 bits         [32 lanes][2 steps][row g, row g + 8][4 channels], code + 128 | fp16 scales [8][g, g + 8]
//   4 bits         [32 lanes][2 steps] words of 8 codes, register r's two at bits 4 r and 4 r + 16
//                  | [8] fp16 scale of g, g + 8, minimum of g, g + 8
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kernels/cuda/model_work.h"

namespace kvanta::kernels::cuda {

inline constexpr int kPanelMultiple = 4;  // panels are padded to it: the most that a block computes

struct UnitBytes {
  int codes = 0;
  int all = 0;
};

KVANTA_HD constexpr UnitBytes BytesOf(PanelKind kind) {
  constexpr int kElementTypes = kPanelOuts * kPanelChannels;
  if (kind == PanelKind::kInt8) return {kElementTypes, kElementTypes + 2 * kPanelOuts};
  if (kind == PanelKind::kInt4) return {kElementTypes / 2, kElementTypes / 2 + 4 * kPanelOuts};
  return {2 * kElementTypes, 2 * kElementTypes};
}

// Of the value of row `row` and channel `channel` in a unit: its first byte, and bit, from the unit's begin.
struct FragmentOffset {
  int byte = 0;
  int bit = 0;
};

KVANTA_HD constexpr FragmentOffset PlaceOf(PanelKind kind, int row, int channel) {
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

// Of a row's fp16 scale; a minimum lies 4 bytes behind it.
KVANTA_HD constexpr int ScalePlace(PanelKind kind, int row) {
  const int each = kind == PanelKind::kInt8 ? 4 : 8;
  return BytesOf(kind).codes + row % 8 * each + row / 8 * 2;
}

}  // namespace kvanta::kernels::cuda
