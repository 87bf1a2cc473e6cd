// What Attend has to know of a side's format: plain data, which a launch carries, and which a kernel that is made for
// one format knows while compiling.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "formats/scale_type.h"

namespace kvanta::kernels::cuda {

// How a code becomes an operand of the tensor cores: one piece of code each.
enum class DecodeKind : uint8_t {
  kF32,  // in three terms of bf16
  kBf16,
  kF16,
  kE4M3,
  kE5M2,
  kInt8,
  kE2M1,
  kFields,  // a plane or two, whose field less an offset is the level
  kLloyd,   // the same, whose field is an index into levels
};

constexpr DecodeKind DecodeKindOf(formats::ElementType code) {
  using formats::ElementType;
  switch (code) {
    case ElementType::kFp32:
      return DecodeKind::kF32;
    case ElementType::kBf16:
      return DecodeKind::kBf16;
    case ElementType::kFp16:
      return DecodeKind::kF16;
    case ElementType::kE4M3:
      return DecodeKind::kE4M3;
    case ElementType::kE5M2:
      return DecodeKind::kE5M2;
    case ElementType::kInt8:
      return DecodeKind::kInt8;
    case ElementType::kE2M1:
      return DecodeKind::kE2M1;
    case ElementType::kLloyd4:
    case ElementType::kLloyd3:
      return DecodeKind::kLloyd;
    default:
      return DecodeKind::kFields;
  }
}

struct KvTypeDesc {
  DecodeKind kind = DecodeKind::kBf16;
  int8_t low_bits = 16;  // of the first plane
  int8_t high_bits = 0;
  int8_t offset = 0;  // kFields: what a field is too much by
  float unit = 1;     // an operand times this, and the scales that have not gone into it, is the value
  formats::Scaling scaling;
};

inline constexpr float kE2m1Unit = 0x1p14F;  // f16's and E2M1's exponents are biased by 15 and 1
// E4M3 scales as f16 operands are 2^7 too large, so that with E2M1's 2^-14 a product is exact and none overflows.
inline constexpr float kE4m3ScaleUnit = 0x1p-7F;
// Channels' scales and zeros are halved: a value just above f16's largest is none of its infinities.
inline constexpr float kChannelUnit = 2.0F;
inline constexpr int kTileTokens = 32;  // that share them

// What the scales of 32 or 16 channels of a token are to a block of 32.
enum class BlockScale : uint8_t {
  kNone,
  kFp16,
  kPower,        // E8M0
  kPowerHalves,  // E8M0 of 16 channels: the greater one is the block's, what the other is less goes into the operands
  kE4m3Halves,   // E4M3 of 16 channels: into the operands, exactly
  kF32,          // of 128 channels; of latents alone
};

inline constexpr int kBlocksOfF32 = 4;  // blocks of 32 channels that share one

constexpr BlockScale BlockScaleOf(const formats::Scaling& scaling) {
  using formats::ScaleType;
  if (scaling.block == ScaleType::kE4M3) return BlockScale::kE4m3Halves;
  if (scaling.block == ScaleType::kE8M0) return scaling.channels == 16 ? BlockScale::kPowerHalves : BlockScale::kPower;
  if (scaling.block == ScaleType::kF32) return BlockScale::kF32;
  return scaling.block == ScaleType::kFp16 ? BlockScale::kFp16 : BlockScale::kNone;
}

// Whether there is code for it.
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
      return block == BlockScale::kPower && scaling.token == ScaleType::kNone;
    case DecodeKind::kInt8:
    case DecodeKind::kLloyd:
      return block != BlockScale::kPower && scaling.token != ScaleType::kF32 && !scaling.token_offset;
    case DecodeKind::kFields:
      return block != BlockScale::kPower && scaling.token != ScaleType::kF32 &&
             (scaling.tile == 0 || scaling.tile == kTileTokens);
  }
  return false;
}

// Values have zeros of blocks, keys share scales by channels, and only these are Lloyd-Max levels.
constexpr bool HasKeyCode(formats::ElementType code, const formats::Scaling& scaling) {
  return HasKvTypeDesc(code, scaling) && !scaling.block_offset;
}
constexpr bool HasValueCode(formats::ElementType code, const formats::Scaling& scaling) {
  return HasKvTypeDesc(code, scaling) && scaling.tile == 0 && DecodeKindOf(code) != DecodeKind::kLloyd;
}

constexpr KvTypeDesc MakeKvTypeDesc(formats::ElementType code, const formats::Scaling& scaling) {
  KvTypeDesc side;
  side.kind = DecodeKindOf(code);
  side.low_bits = static_cast<int8_t>(formats::Info(code).low_bits);
  side.high_bits = static_cast<int8_t>(formats::Info(code).high_bits);
  side.scaling = scaling;
  if (side.kind == DecodeKind::kFields) side.offset = static_cast<int8_t>(-formats::Levels(code).level[0]);
  if (side.kind == DecodeKind::kLloyd) side.unit = formats::Levels(code).unit;
  if (side.kind == DecodeKind::kE2M1) {
    const BlockScale block = BlockScaleOf(scaling);
    if (block != BlockScale::kPowerHalves) side.unit = kE2m1Unit;
    if (block == BlockScale::kE4m3Halves) side.unit *= kE4m3ScaleUnit;
  }
  if (scaling.tile != 0) side.unit = kChannelUnit;
  return side;
}

}  // namespace kvanta::kernels::cuda
