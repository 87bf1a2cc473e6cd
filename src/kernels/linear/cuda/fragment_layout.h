// Layout of packed weights on a GPU: [panels][units][codes | scales]. A panel is 16 rows of W, a unit 32 of their
// channels: the A operands of two 16 x 16 products in mma.m16n8k16's fragment order. A lane takes one or two loads of 8
// to 16 bytes, and a warp's loads are contiguous.
//
//   lane 4 g + t   has rows g and g + 8, channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16
//   16 bits        [2 steps of 16 channels][32 lanes][4 registers of 2]
//   8 bits         [32 lanes][2 steps][row g, row g + 8][4 channels], code + 128 | fp16 scales [8][g, g + 8]
//   4 bits         [32 lanes][2 steps] words of 8 codes, register r's two at bits 4 r and 4 r + 16
//                  | [8] fp16 scale of g, g + 8, minimum of g, g + 8
//
// With scales apart, units have codes only, and [panels][groups of units] of scales follow, [8 g] of:
//
//   e4m3, int8     f32 scale of rows g, g + 8; codes of kE4m3Groups and kMxfp8 are E4M3 bytes
//   int4           f32 scale of g, g + 8, then f16 -(1024 + zero point) twice of g, twice of g + 8
//   mxfp4, mxfp8   E8M0 scale of g, g + 8
//   nvfp4          E4M3 scale of g's two steps, of g + 8's; factors: [panels][8 g] f32 of g, g + 8
//   blocks         word of g, of g + 8: int8 scales of the two steps, uint8 offset; factors: [panels][blocks][8 g] f32
//                  scale of g, g + 8, offset of g, g + 8
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

// Bits of a code.
KVANTA_HD constexpr int CodeBitsOf(PanelKind kind) {
  switch (kind) {
    case PanelKind::kBf16:
    case PanelKind::kF16:
      return 16;
    case PanelKind::kInt8:
    case PanelKind::kE4m3Groups:
    case PanelKind::kInt8Groups:
    case PanelKind::kMxfp8:
    case PanelKind::kBlocks8:
      return 8;
    case PanelKind::kInt4:
    case PanelKind::kInt4Groups:
    case PanelKind::kMxfp4:
    case PanelKind::kNvfp4:
    case PanelKind::kBlocks4:
      break;
  }
  return 4;
}

// Bytes of the scales of a panel's group of units; 0: they are not apart.
KVANTA_HD constexpr int ScaleBytesOf(PanelKind kind) {
  switch (kind) {
    case PanelKind::kE4m3Groups:
    case PanelKind::kInt8Groups:
    case PanelKind::kBlocks4:
    case PanelKind::kBlocks8:
      return 8 * 8;
    case PanelKind::kInt4Groups:
      return 8 * 16;
    case PanelKind::kMxfp4:
    case PanelKind::kMxfp8:
      return 8 * 2;
    case PanelKind::kNvfp4:
      return 8 * 4;
    case PanelKind::kBf16:
    case PanelKind::kF16:
    case PanelKind::kInt8:
    case PanelKind::kInt4:
      break;
  }
  return 0;
}
KVANTA_HD constexpr bool IsBlocks(PanelKind kind) {
  return kind == PanelKind::kBlocks4 || kind == PanelKind::kBlocks8;
}
// Bytes of the factors of a panel (kNvfp4), or of its blocks of units.
KVANTA_HD constexpr int FactorBytesOf(PanelKind kind) {
  return kind == PanelKind::kNvfp4 ? 8 * 8 : IsBlocks(kind) ? 8 * 16 : 0;
}
// Groups of units with scales of their own in a panel, and blocks of units with factors.
KVANTA_HD constexpr int64_t ScaleGroupsOf(const Weight& weight) {
  return IsBlocks(weight.kind) ? weight.Units() : CeilDiv(weight.Units(), int64_t{1} << weight.group_shift);
}
KVANTA_HD constexpr int64_t FactorGroupsOf(const Weight& weight) {
  return IsBlocks(weight.kind) ? CeilDiv(weight.Units(), int64_t{1} << weight.group_shift) : 1;
}

KVANTA_HD constexpr UnitBytes UnitBytesOf(PanelKind kind) {
  constexpr int kCount = kPanelRows * kPanelChannels;
  if (ScaleBytesOf(kind) != 0) return {kCount * CodeBitsOf(kind) / 8, kCount * CodeBitsOf(kind) / 8};
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
  if (CodeBitsOf(kind) == 8) return {lane * 16 + (2 * step + high_row) * 4 + 2 * high_half + odd, 0};
  if (CodeBitsOf(kind) == 4) {
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
