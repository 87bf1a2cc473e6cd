// Description of a K or V format for the attention kernels: a launch argument, or a compile-time constant in a kernel
// specialized for one format.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "formats/scale_type.h"

namespace kvanta::kernels::cuda {

// Decoding of codes to tensor-core operands: one code path each.
enum class DecodeKind : uint8_t {
  kF32,  // as three bf16 terms
  kBf16,
  kF16,
  kE4M3,
  kE5M2,
  kInt8,
  kE2M1,
  kE3M2,     // two bit sections
  kFields,   // one or two bit sections; level = field - offset
  kLloyd,    // one or two bit sections; field = index into the levels
  kTrellis,  // windows of 8 bits over the row's codes = indices into the levels
  kKlt,      // the same with bits that differ by channel
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
    case formats::Decoding::kTrellis:
      return DecodeKind::kTrellis;
    case formats::Decoding::kKlt:
      return DecodeKind::kKlt;
    case formats::Decoding::kFloat:
      break;
  }
  if (type == ElementType::kFp32) return DecodeKind::kF32;
  if (type == ElementType::kFp16) return DecodeKind::kF16;
  if (type == ElementType::kE4M3) return DecodeKind::kE4M3;
  return type == ElementType::kE5M2 ? DecodeKind::kE5M2 : DecodeKind::kBf16;
}

struct KvTypeDesc {
  DecodeKind decode = DecodeKind::kBf16;
  int8_t low_bits = 16;  // first bit section
  int8_t high_bits = 0;  // second bit section
  int8_t offset = 0;     // kFields: subtracted from a field
  float unit = 1;        // value = operand * unit * scales that are not part of the operand
  formats::Scaling scaling;
};

inline constexpr float kE2m1Unit = 0x1p14F;  // exponent biases: f16 15, E2M1 1
inline constexpr float kE3m2Unit = 0x1p12F;  // E3M2 3
// E4M3 scales enter f16 operands times 2^7: the product with E2M1's 2^-14 is exact and cannot overflow.
inline constexpr float kE4m3ScaleUnit = 0x1p-7F;
// Channel scales and offsets are halved: values just above f16's maximum stay finite.
inline constexpr float kChannelUnit = 2.0F;
inline constexpr int kGroupTokens = 32;  // tokens that share a channel's scale and offset

// Scales per block of 32 channels of one token.
enum class BlockScale : uint8_t {
  kNone,
  kFp16,
  kPower,        // E8M0
  kPowerHalves,  // E8M0 per 16 channels: the larger is the block's scale, the ratio is folded into the operands
  kE4m3Halves,   // E4M3 per 16 channels: folded into the operands, exactly
  kF32,          // f32 per 128 channels; latents only
};

// True if products of a block of 32 channels are scaled: scales are not folded into their operands.
constexpr bool HasBlockScales(BlockScale scale) {
  return scale != BlockScale::kNone && scale != BlockScale::kE4m3Halves;
}

inline constexpr int kBlocksPerF32Scale = 4;  // blocks of 32 channels

constexpr BlockScale BlockScaleOf(const formats::Scaling& scaling) {
  using formats::ScaleType;
  if (scaling.block == ScaleType::kE4M3) return BlockScale::kE4m3Halves;
  if (scaling.block == ScaleType::kE8M0) return scaling.channels == 16 ? BlockScale::kPowerHalves : BlockScale::kPower;
  if (scaling.block == ScaleType::kF32) return BlockScale::kF32;
  return scaling.block == ScaleType::kFp16 ? BlockScale::kFp16 : BlockScale::kNone;
}

// True if the kernels can decode the combination.
constexpr bool CanDecode(formats::ElementType code, const formats::Scaling& scaling) {
  using formats::ScaleType;
  const DecodeKind decode = DecodeKindOf(code);
  const BlockScale block = BlockScaleOf(scaling);
  if (block == BlockScale::kF32) {
    return (decode == DecodeKind::kE4M3 || decode == DecodeKind::kE5M2) && scaling.channels == 32 * kBlocksPerF32Scale;
  }
  if (block == BlockScale::kE4m3Halves || block == BlockScale::kPowerHalves) {
    return decode == DecodeKind::kE2M1 && scaling.channels == 16;
  }
  if (block != BlockScale::kNone && scaling.channels != 32) return false;
  switch (decode) {
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
    case DecodeKind::kTrellis:
    case DecodeKind::kKlt:
      return block == BlockScale::kNone && scaling.token == ScaleType::kFp16 && !scaling.token_offset &&
             (scaling.token_group == 0 || (scaling.channel_bits && decode == DecodeKind::kKlt));
    case DecodeKind::kFields:
      return block != BlockScale::kPower && scaling.token != ScaleType::kF32 &&
             (scaling.token_group == 0 || scaling.token_group == kGroupTokens);
  }
  return false;
}

// Types of the generic kernel. Block offsets are supported for values only; channel scales, Lloyd-Max levels and bits
// that differ by channel for keys only.
constexpr bool CanDecodeKeys(formats::ElementType code, const formats::Scaling& scaling) {
  return CanDecode(code, scaling) && !scaling.block_offset && scaling.block != formats::ScaleType::kF32;
}
constexpr bool CanDecodeValues(formats::ElementType code, const formats::Scaling& scaling) {
  return CanDecode(code, scaling) && scaling.token_group == 0 && scaling.block != formats::ScaleType::kF32 &&
         DecodeKindOf(code) != DecodeKind::kLloyd && DecodeKindOf(code) != DecodeKind::kKlt;
}

constexpr KvTypeDesc MakeKvTypeDesc(formats::ElementType code, const formats::Scaling& scaling) {
  KvTypeDesc desc;
  desc.decode = DecodeKindOf(code);
  desc.low_bits = static_cast<int8_t>(formats::Info(code).low_bits);
  desc.high_bits = static_cast<int8_t>(formats::Info(code).high_bits);
  desc.scaling = scaling;
  if (desc.decode == DecodeKind::kFields) desc.offset = static_cast<int8_t>(-formats::Levels(code).level[0]);
  if (desc.decode == DecodeKind::kE3M2) desc.unit = kE3m2Unit;
  if (desc.decode == DecodeKind::kLloyd) desc.unit = formats::Levels(code).unit;
  if (desc.decode == DecodeKind::kE2M1) {
    const BlockScale block = BlockScaleOf(scaling);
    if (block != BlockScale::kPowerHalves) desc.unit = kE2m1Unit;
    if (block == BlockScale::kE4m3Halves) desc.unit *= kE4m3ScaleUnit;
  }
  if (scaling.token_group != 0 && !scaling.channel_bits) desc.unit = kChannelUnit;
  return desc;
}

}  // namespace kvanta::kernels::cuda
