// How one element is stored: the list of codes. Formats name one, kernels have one entry per code.
//
// A row of codes is one bit plane, or two (the widths are powers of two, so no field straddles a byte): first the low
// bits of all channels, then the high bits. Fields of a plane of `w` bits lie in units of 4 bytes, F = 8 / w fields a
// byte; field i of byte b (from the low bits up) belongs to the unit's channel
//
//     8 * (i / 2) + 2 * b + i % 2
//
// so for 4 bits the low nibble is the even channel, and equal fields of a 4-bit, a 2-bit and a 1-bit plane meet by
// shifts alone.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvanta::formats {

// Kernels dispatch on this, once, at plan time.
enum class ElementType : uint8_t {
  kFp32,
  kBf16,
  kFp16,
  kE4M3,
  kE5M2,
  kInt8,    // two's complement
  kInt6,    // the signed ones below 8 bits are offset binary: field = code + 2^(bits - 1)
  kInt5,    //
  kInt4,    //
  kInt3,    //
  kInt2,    //
  kUint4,   //
  kUint3,   //
  kUint2,   //
  kE2M1,    // sign, 2 exponent bits, 1 mantissa bit
  kLloyd4,  // Lloyd-Max levels of a normal distribution, field = index in ascending order
  kLloyd3,
};
inline constexpr int kElementTypes = static_cast<int>(ElementType::kLloyd3) + 1;

struct ElementTypeInfo {
  std::string_view name;  // as page files and documentation call it
  int low_bits;           // width of the first plane; the only one of most
  int high_bits = 0;      // width of the second
  bool integer = false;   // values are `unit` times small integers: kernels multiply these in integer arithmetic
};

constexpr ElementTypeInfo Info(ElementType code) noexcept {
  constexpr ElementTypeInfo kInfos[kElementTypes] = {
      {.name = "fp32", .low_bits = 32},
      {.name = "bf16", .low_bits = 16},
      {.name = "fp16", .low_bits = 16},
      {.name = "e4m3", .low_bits = 8},
      {.name = "e5m2", .low_bits = 8},
      {.name = "int8", .low_bits = 8, .integer = true},
      {.name = "int6", .low_bits = 4, .high_bits = 2, .integer = true},
      {.name = "int5", .low_bits = 4, .high_bits = 1, .integer = true},
      {.name = "int4", .low_bits = 4, .integer = true},
      {.name = "int3", .low_bits = 2, .high_bits = 1, .integer = true},
      {.name = "int2", .low_bits = 2, .integer = true},
      {.name = "uint4", .low_bits = 4, .integer = true},
      {.name = "uint3", .low_bits = 2, .high_bits = 1, .integer = true},
      {.name = "uint2", .low_bits = 2, .integer = true},
      {.name = "e2m1", .low_bits = 4, .integer = true},
      {.name = "lloyd4", .low_bits = 4, .integer = true},
      {.name = "lloyd3", .low_bits = 2, .high_bits = 1, .integer = true}};
  return kInfos[static_cast<int>(code)];
}

constexpr std::string_view Name(ElementType code) noexcept {
  return Info(code).name;
}

// Bits of one element in the codes plane.
constexpr int CodeBits(ElementType code) noexcept {
  return Info(code).low_bits + Info(code).high_bits;
}

// Channels that head_dim must be a multiple of, so that both planes end with a unit.
constexpr int CodeChannels(ElementType code) noexcept {
  const int narrow = Info(code).high_bits != 0 ? Info(code).high_bits : Info(code).low_bits;
  return narrow >= 4 ? 8 : 32 / narrow;
}

// ---- integer codes below 8 bits: value = unit * level[field]

struct CodeLevels {
  int8_t level[64];  // the first 2^bits count
  float unit;
};

constexpr CodeLevels Levels(ElementType code) noexcept {
  CodeLevels levels{.level = {}, .unit = 1};
  const auto set = [&levels](const auto& values) {
    int i = 0;  // not in the loop's head: nvcc could not evaluate it
    for (const int value : values) levels.level[i++] = static_cast<int8_t>(value);
  };
  switch (code) {
    case ElementType::kE2M1: {  // halves
      constexpr int kHalves[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
      set(kHalves);
      levels.unit = 0.5F;
      break;
    }
    // Lloyd-Max quantizers of the standard normal distribution, in steps of their largest level / 127.
    case ElementType::kLloyd4: {
      constexpr int kSteps[] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};
      set(kSteps);
      levels.unit = 2.7326F / 127.0F;
      break;
    }
    case ElementType::kLloyd3: {
      constexpr int kSteps[] = {-127, -79, -45, -14, 14, 45, 79, 127};
      set(kSteps);
      levels.unit = 2.1519F / 127.0F;
      break;
    }
    default: {
      const bool has_sign = code != ElementType::kUint4 && code != ElementType::kUint3 && code != ElementType::kUint2;
      const int count = 1 << CodeBits(code);
      for (int i = 0; i < count && i < 64; ++i) levels.level[i] = static_cast<int8_t>(i - (has_sign ? count / 2 : 0));
    }
  }
  return levels;
}

}  // namespace kvanta::formats
