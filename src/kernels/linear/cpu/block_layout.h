// Layouts of W in blocks of 32 k for the matrix kernels (block_weight.h), and the layout of a step of a panel:
//
//   codes of each block of the step, unsigned: the lowest bits, [64 bytes] per quad of k and 8 bits, then the highest
//   ones likewise: byte 4 c + i of a quad holds the code of column c and k = 4 q + i; quads that share 64 bytes follow
//   each other from the lowest bits up
//   scales [16] | offsets [16] where there are any
//   sub-scales [blocks][32 / sub][16] | sub-offsets likewise
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "weights/block_format.h"

namespace kvanta::kernels {

inline constexpr int kBlockK = 32;
inline constexpr int kPanelColumns = 16;  // columns of a panel of W, in every storage

enum class ScaleType : uint8_t { kFp16, kE8M0, kF32 };
enum class SubScaleType : uint8_t {
  kNone,
  kInt8,
  kUint8,     // with an offset, uint8 too
  kTwoUint4,  // with an offset in the high half of the byte
  kE4M3,
};
enum class CodeTable : uint8_t { kNone, kIq4, kE2m1 };

struct BlockLayout {
  int low_bits = 0;         // 8, 4 or 2
  int high_bits = 0;        // 0, 1 or 2
  int code_offset = 0;      // added to codes, so that they are unsigned
  bool has_offset = false;  // blocks have an offset in addition to the scale
  int blocks = 1;           // in a step
  int sub = kBlockK;        // k of a sub-scale
  ScaleType scale = ScaleType::kFp16;
  SubScaleType sub_scale = SubScaleType::kNone;
  CodeTable table = CodeTable::kNone;  // table of the values that codes of 4 bits stand for
  bool is_expanded = false;            // a copy in the cache, of bytes

  constexpr KVANTA_INLINE int StepK() const { return blocks * kBlockK; }
  constexpr KVANTA_INLINE int Subs() const { return kBlockK / sub; }
  constexpr KVANTA_INLINE int CodeBytes() const {
    return kPanelColumns * kBlockK * (low_bits + high_bits) / 8;
  }  // of a block
  constexpr KVANTA_INLINE int ScaleBytes() const {
    return kPanelColumns * (scale == ScaleType::kFp16 ? 2 : scale == ScaleType::kF32 ? 4 : 1);
  }
  constexpr KVANTA_INLINE int SubScaleBytes() const {
    if (sub_scale == SubScaleType::kNone) return 0;
    return blocks * Subs() * kPanelColumns * (sub_scale == SubScaleType::kUint8 ? 2 : 1);
  }
  // Offsets in a step.
  constexpr KVANTA_INLINE int Scales() const { return blocks * CodeBytes(); }
  constexpr KVANTA_INLINE int Offsets() const { return Scales() + ScaleBytes(); }
  constexpr KVANTA_INLINE int SubScales() const { return Offsets() + (has_offset ? ScaleBytes() : 0); }
  constexpr KVANTA_INLINE int SubOffsets() const { return SubScales() + SubScaleBytes() / 2; }
  constexpr KVANTA_INLINE int StepBytes() const {
    const int bytes = SubScales() + SubScaleBytes();
    return is_expanded ? (bytes + 63) / 64 * 64 : bytes;
  }
  // Maximum of the unsigned codes.
  constexpr KVANTA_INLINE int MaxCode() const {
    if (table == CodeTable::kIq4) return 113 + code_offset;
    if (table == CodeTable::kE2m1) return 12 + code_offset;
    return (1 << (low_bits + high_bits)) - 1;
  }
};

// Layout of a copy with a byte per code: the code, or the value that it stands for, unsigned.
constexpr BlockLayout ExpandedOf(BlockLayout layout) {
  layout.low_bits = 8;
  layout.high_bits = 0;
  layout.table = CodeTable::kNone;
  layout.is_expanded = true;
  return layout;
}

// In the order of weights::BlockFormat; nothing for kNone. Q8_0, Q4_0 and Q4_1 also hold weights that are quantized
// here. In addition to its sub-scales, NVFP4 has the scale of the tensor.
inline constexpr BlockLayout kBlockLayouts[weights::kBlockFormats] = {
    {},
    {.low_bits = 8, .code_offset = 128},
    {.low_bits = 4, .code_offset = 8},
    {.low_bits = 4, .has_offset = true},
    {.low_bits = 4, .high_bits = 1, .code_offset = 16},
    {.low_bits = 4, .high_bits = 1, .has_offset = true},
    {.low_bits = 2, .has_offset = true, .blocks = 8, .sub = 16, .sub_scale = SubScaleType::kTwoUint4},
    {.low_bits = 2, .high_bits = 1, .code_offset = 4, .blocks = 8, .sub = 16, .sub_scale = SubScaleType::kInt8},
    {.low_bits = 4, .has_offset = true, .blocks = 8, .sub_scale = SubScaleType::kUint8},
    {.low_bits = 4, .high_bits = 1, .has_offset = true, .blocks = 8, .sub_scale = SubScaleType::kUint8},
    {.low_bits = 4, .high_bits = 2, .code_offset = 32, .blocks = 8, .sub = 16, .sub_scale = SubScaleType::kInt8},
    {.low_bits = 4, .code_offset = 127, .table = CodeTable::kIq4},
    {.low_bits = 4, .code_offset = 127, .blocks = 8, .sub_scale = SubScaleType::kInt8, .table = CodeTable::kIq4},
    {.low_bits = 4, .code_offset = 12, .scale = ScaleType::kE8M0, .table = CodeTable::kE2m1},
    {.low_bits = 4,
     .code_offset = 12,
     .blocks = 8,
     .sub = 16,
     .scale = ScaleType::kF32,
     .sub_scale = SubScaleType::kE4M3,
     .table = CodeTable::kE2m1},
};

constexpr const BlockLayout& LayoutOf(weights::BlockFormat format) {
  return kBlockLayouts[static_cast<int>(format)];
}

}  // namespace kvanta::kernels
