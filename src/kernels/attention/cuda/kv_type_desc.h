// Description of a side's format for the attention kernels: an argument of a launch, or a constant of a kernel for one
// format.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "formats/scale_type.h"

namespace kvanta::kernels::cuda {

// Conversion of an element to an operand of the tensor cores.
enum class DecodeKind : uint8_t {
  kF32,  // in three terms of bf16
  kBf16,
  kF16,
  kE4M3,
  kE5M2,
  kInt8,
  kE2M1,
  kE3M2,    // two bit planes
  kFields,  // one or two bit planes; field - offset is the level
  kLloyd,   // the same; the field is an index into the levels
};

constexpr DecodeKind DecodeKindOf(formats::ElementType type) {
  using formats::ElementType;
  switch (formats::Info(type).decoding) {
    case formats::Decoding::kInt8:
      return DecodeKind::kInt8;
    case formats::Decoding::kSubbyte:
      return DecodeKind::kFields;
    case formats::Decoding::kTable:
      return DecodeKind::kE2M1;
    case formats::Decoding::kLookup8:
      return formats::IsInteger(type) ? DecodeKind::kLloyd : DecodeKind::kE3M2;
    case formats::Decoding::kFloat:
      break;
  }
  if (type == ElementType::kFp32) return DecodeKind::kF32;
  if (type == ElementType::kFp16) return DecodeKind::kF16;
  if (type == ElementType::kE4M3) return DecodeKind::kE4M3;
  return type == ElementType::kE5M2 ? DecodeKind::kE5M2 : DecodeKind::kBf16;
}

struct KvTypeDesc {
  DecodeKind kind = DecodeKind::kBf16;
  int8_t low_bits = 16;  // of the first plane
  int8_t high_bits = 0;
  int8_t offset = 0;  // kFields: field - level
  float unit = 1;     // value = operand * unit * (scales that are not part of the operand)
  formats::Scaling scaling;
};

inline constexpr float kE2m1Unit = 0x1p14F;  // f16's and E2M1's exponents are biased by 15 and 1
inline constexpr float kE3m2Unit = 0x1p12F;  // E3M2's by 3
// E4M3 scales as f16 operands are 2^7 too large, so that with E2M1's 2^-14 a product is exact and none overflows.
inline constexpr float kE4m3ScaleUnit = 0x1p-7F;
// Scales and offsets of channels are halved, so that a value just above f16's maximum does not become infinite.
inline constexpr float kChannelUnit = 2.0F;
inline constexpr int kGroupTokens = 32;  // tokens that share them

// Use of the scales of 16, 32 or 128 channels of a token in a block of 32 channels.
enum class BlockScale : uint8_t {
  kNone,
  kFp16,
  kPower,        // E8M0
  kPowerHalves,  // E8M0 of 16 channels: the block has the greater one, operands are multiplied by the ratio
  kE4m3Halves,   // E4M3 of 16 channels: operands are multiplied by it, exactly
  kF32,          // of 128 channels
};

inline constexpr int kBlocksOfF32 = 4;  // blocks of 32 channels that share one

constexpr BlockScale BlockScaleOf(const formats::Scaling& scaling) {
  using formats::ScaleType;
  if (scaling.block == ScaleType::kE4M3) return BlockScale::kE4m3Halves;
  if (scaling.block == ScaleType::kE8M0) return scaling.channels == 16 ? BlockScale::kPowerHalves : BlockScale::kPower;
  if (scaling.block == ScaleType::kF32) return BlockScale::kF32;
  return scaling.block == ScaleType::kFp16 ? BlockScale::kFp16 : BlockScale::kNone;
}

// True if the kernels support the combination.
constexpr bool HasKvTypeDesc(formats::ElementType code, const formats::Scaling& scaling) {
  using formats::ScaleType;
  const DecodeKind kind = DecodeKindOf(code);
  const BlockScale block = BlockScaleOf(scaling);
  if (block == BlockScale::kF32) return kind == DecodeKind::kE4M3 && scaling.channels == 32 * kBlocksOfF32;
  if (block == BlockScale::kE4m3Halves || block == BlockScale::kPowerHalves) {
    return kind == DecodeKind::kE2M1 && scaling.channels == 16;
  }
  if (block != BlockScale::kNone && scaling.channels != 32) return false;
  switch (kind) {
    case DecodeKind::kF32:
    case DecodeKind::kBf16:
    case DecodeKind::kF16:
    case DecodeKind::kE5M2:
      return block == BlockScale::kNone && scaling.token == ScaleType::kNone;
    case DecodeKind::kE4M3:
      return block != BlockScale::kFp16 && scaling.token != ScaleType::kFp16 && scaling.token != ScaleType::kE8M0;
    case DecodeKind::kE2M1:
    case DecodeKind::kE3M2:
      return block == BlockScale::kPower && scaling.token == ScaleType::kNone;
    case DecodeKind::kInt8:
    case DecodeKind::kLloyd:
      return block != BlockScale::kPower && scaling.token != ScaleType::kF32 && !scaling.token_offset;
    case DecodeKind::kFields:
      return block != BlockScale::kPower && scaling.token != ScaleType::kF32 &&
             (scaling.token_group == 0 || scaling.token_group == kGroupTokens);
  }
  return false;
}

// Supported by the generic kernel. Only values have block offsets; only keys have token groups and Lloyd-Max levels.
constexpr bool HasKeyCode(formats::ElementType code, const formats::Scaling& scaling) {
  return HasKvTypeDesc(code, scaling) && !scaling.block_offset && scaling.block != formats::ScaleType::kF32;
}
constexpr bool HasValueCode(formats::ElementType code, const formats::Scaling& scaling) {
  return HasKvTypeDesc(code, scaling) && scaling.token_group == 0 && scaling.block != formats::ScaleType::kF32 &&
         DecodeKindOf(code) != DecodeKind::kLloyd;
}

constexpr KvTypeDesc MakeKvTypeDesc(formats::ElementType code, const formats::Scaling& scaling) {
  KvTypeDesc side;
  side.kind = DecodeKindOf(code);
  side.low_bits = static_cast<int8_t>(formats::Info(code).low_bits);
  side.high_bits = static_cast<int8_t>(formats::Info(code).high_bits);
  side.scaling = scaling;
  if (side.kind == DecodeKind::kFields) side.offset = static_cast<int8_t>(-formats::Levels(code).level[0]);
  if (side.kind == DecodeKind::kE3M2) side.unit = kE3m2Unit;
  if (side.kind == DecodeKind::kLloyd) side.unit = formats::Levels(code).unit;
  if (side.kind == DecodeKind::kE2M1) {
    const BlockScale block = BlockScaleOf(scaling);
    if (block != BlockScale::kPowerHalves) side.unit = kE2m1Unit;
    if (block == BlockScale::kE4m3Halves) side.unit *= kE4m3ScaleUnit;
  }
  if (scaling.token_group != 0) side.unit = kChannelUnit;
  return side;
}

}  // namespace kvanta::kernels::cuda
