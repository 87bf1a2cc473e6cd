// The list of element types: how one element is stored. A format has one; kernels have one entry for each.
//
// A row of codes is one bit plane, or two (the widths are powers of two, so no field straddles a byte): first the low
// bits of all channels, then the high bits. Fields of a plane of `w` bits are in units of 4 bytes, F = 8 / w fields a
// byte; field i of byte b (from the low bits up) belongs to the unit's channel
//
//     8 * (i / 2) + 2 * b + i % 2
//
// so for 4 bits the low nibble is the even channel, and shifts alone align equal fields of 4-bit, 2-bit and 1-bit
// planes.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvanta::formats {

// Kernels dispatch on this, once, at plan time. A new one is its line here and in Info().
enum class ElementType : uint8_t {
  kFp32,
  kBf16,
  kFp16,
  kE4M3,
  kE5M2,
  kInt8,
  kInt6,
  kInt5,
  kInt4,
  kInt3,
  kInt2,
  kUint4,
  kUint3,
  kUint2,
  kE3M2,
  kE2M1,
  kLloyd4,  // Lloyd-Max levels of a normal distribution, field = index in ascending order
  kLloyd3,
  kTrellis4,  // window of 8 bits over the row's codes = index of a level (formats/trellis.h)
  kTrellis3,
  kTrellis2,
  kKlt3,  // trellis codes whose widths differ by channel, 3 bits on average (formats/klt.h)
  kKlt2,
};
inline constexpr int kElementTypes = static_cast<int>(ElementType::kKlt2) + 1;

// Way in which kernels decode an element.
enum class Decoding : uint8_t {
  kFloat,    // float of 8 bits or more
  kInt8,     // two's complement
  kSubbyte,  // field + `lowest`: an integer, multiplied in integer arithmetic
  kTable,    // small integer from a table of 16 levels, likewise
  kLookup8,  // byte from a table of levels: an element of type `expanded`
  kTrellis,  // int8 from a table of 256 levels, by a window that neighbouring elements share
  kKlt,      // likewise, from a table for each width
};

struct ElementTypeInfo {
  std::string_view name;  // as in page files and documentation
  int low_bits;           // width of the first plane; the only one of most
  int high_bits = 0;      // width of the second
  Decoding decoding = Decoding::kFloat;
  int lowest = 0;                             // kSubbyte: level of field 0
  ElementType expanded = ElementType::kInt8;  // kLookup8
  std::string_view layout = {};               // bits, and their meaning, for documentation
};

constexpr ElementTypeInfo Info(ElementType type) noexcept {
  using enum Decoding;
  constexpr ElementTypeInfo kInfos[kElementTypes] = {
      {.name = "fp32", .low_bits = 32, .layout = "s eeeeeeee mmmmmmm mmmmmmmm mmmmmmmm   4 bytes, IEEE single"},
      {.name = "bf16",
       .low_bits = 16,
       .layout = "s eeeeeeee mmmmmmm                     2 bytes, the upper half of an IEEE single"},
      {.name = "fp16", .low_bits = 16, .layout = "s eeeee mmmmmmmmmm                     2 bytes, IEEE half"},
      {.name = "e4m3",
       .low_bits = 8,
       .layout = "s eeee mmm                             bias 7; 0x7f and 0xff are NaN, no infinities (E4M3FN)"},
      {.name = "e5m2",
       .low_bits = 8,
       .layout = "s eeeee mm                             bias 15; 0x7c infinity (never written), 0x7d.. NaN"},
      {.name = "int8",
       .low_bits = 8,
       .decoding = kInt8,
       .layout = "iiiiiiii                               two's complement, -128 unused"},
      {.name = "int6",
       .low_bits = 4,
       .high_bits = 2,
       .decoding = kSubbyte,
       .lowest = -32,
       .layout = "llll + hh                              planes of 4 and 2 bits; field = code + 32"},
      {.name = "int5",
       .low_bits = 4,
       .high_bits = 1,
       .decoding = kSubbyte,
       .lowest = -16,
       .layout = "llll + h                               planes of 4 and 1 bits; field = code + 16"},
      {.name = "int4",
       .low_bits = 4,
       .decoding = kSubbyte,
       .lowest = -8,
       .layout = "hhhh llll                              low nibble: even channel, high: odd; field = code + 8"},
      {.name = "int3",
       .low_bits = 2,
       .high_bits = 1,
       .decoding = kSubbyte,
       .lowest = -4,
       .layout = "ll + h                                 planes of 2 and 1 bits; field = code + 4"},
      {.name = "int2",
       .low_bits = 2,
       .decoding = kSubbyte,
       .lowest = -2,
       .layout = "ll                                     a plane of 2 bits; field = code + 2"},
      {.name = "uint4",
       .low_bits = 4,
       .decoding = kSubbyte,
       .layout = "hhhh llll                              low nibble: even channel, high: odd; field = code"},
      {.name = "uint3",
       .low_bits = 2,
       .high_bits = 1,
       .decoding = kSubbyte,
       .layout = "ll + h                                 planes of 2 and 1 bits; field = code"},
      {.name = "uint2",
       .low_bits = 2,
       .decoding = kSubbyte,
       .layout = "ll                                     a plane of 2 bits; field = code"},
      {.name = "e3m2",
       .low_bits = 4,
       .high_bits = 2,
       .decoding = kLookup8,
       .expanded = ElementType::kE4M3,
       .layout = "mmmm + hh                              planes of 4 and 2 bits; field = s eee mm, bias 3"},
      {.name = "e2m1",
       .low_bits = 4,
       .decoding = kTable,
       .layout = "s ee m                                 0, 0.5, 1, 1.5, 2, 3, 4, 6; low nibble: even channel"},
      {.name = "lloyd4",
       .low_bits = 4,
       .decoding = kLookup8,
       .layout = "hhhh llll                              field: index of the level, ascending"},
      {.name = "lloyd3",
       .low_bits = 2,
       .high_bits = 1,
       .decoding = kLookup8,
       .layout = "ll + h                                 planes of 2 and 1 bits; field: index of the level"},
      {.name = "trellis4",
       .low_bits = 4,
       .decoding = kTrellis,
       .layout = "cccc                                   string of 4-bit codes; level: the 8 bits from the code on"},
      {.name = "trellis3",
       .low_bits = 3,
       .decoding = kTrellis,
       .layout = "ccc                                    string of 3-bit codes; level: the 8 bits from the code on"},
      {.name = "trellis2",
       .low_bits = 2,
       .decoding = kTrellis,
       .layout = "cc                                     string of 2-bit codes; level: the 8 bits from the code on"},
      {.name = "klt3",
       .low_bits = 3,
       .decoding = kKlt,
       .layout = "c..                                    codes of 0 to 7 bits by channel, 3 on average"},
      {.name = "klt2",
       .low_bits = 2,
       .decoding = kKlt,
       .layout = "c.                                     codes of 0 to 7 bits by channel, 2 on average"}};
  return kInfos[static_cast<int>(type)];
}

constexpr std::string_view Name(ElementType type) noexcept {
  return Info(type).name;
}

// Values are `unit` times small integers, which kernels multiply in integer arithmetic.
constexpr bool IsInteger(ElementType type) noexcept {
  const ElementTypeInfo info = Info(type);
  const bool expands = info.decoding == Decoding::kLookup8 && Info(info.expanded).decoding != Decoding::kInt8;
  return info.decoding != Decoding::kFloat && !expands;
}

// Integers of up to 6 bits, whose operands kernels keep to 8 bits; other integers: to 16.
constexpr bool IsSubbyte(ElementType type) noexcept {
  return Info(type).decoding == Decoding::kSubbyte || Info(type).decoding == Decoding::kTable;
}

// Codes whose levels depend on the codes that follow: see formats/trellis.h.
constexpr bool IsTrellis(ElementType type) noexcept {
  return Info(type).decoding == Decoding::kTrellis;
}

// Codes whose widths are those of a head's BitAllocation: see formats/klt.h.
constexpr bool IsAllocated(ElementType type) noexcept {
  return Info(type).decoding == Decoding::kKlt;
}

// Unsigned integers, which formats use with an offset.
constexpr bool IsUnsigned(ElementType type) noexcept {
  return Info(type).decoding == Decoding::kSubbyte && Info(type).lowest == 0;
}

// Bits of one element.
constexpr int CodeBits(ElementType code) noexcept {
  return Info(code).low_bits + Info(code).high_bits;
}

// Channels that head_dim must be a multiple of, so that both planes, or the string of codes, end with a unit.
constexpr int CodeChannels(ElementType code) noexcept {
  const int narrow = Info(code).high_bits != 0 ? Info(code).high_bits : Info(code).low_bits;
  if (narrow == 3) return 32;
  return narrow >= 4 ? 8 : 32 / narrow;
}

// ---- elements below 8 bits: value = unit * level[field], or the value of an `expanded` element with the bits of level

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
    case ElementType::kE3M2:  // the E4M3 of the same value; subnormal fields are normal there
      for (int i = 0; i < 64; ++i) {
        constexpr int kSubnormal[] = {0, 0x18, 0x20, 0x24};
        const int magnitude = i % 32;
        const int byte = magnitude < 4 ? kSubnormal[magnitude] : 2 * magnitude + 0x20;
        levels.level[i] = static_cast<int8_t>(i < 32 ? byte : byte - 128);
      }
      break;
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
      const int count = 1 << CodeBits(code), lowest = Info(code).lowest;  // once: a call costs a compiler many steps
      for (int i = 0; i < 64 && i < count; ++i) levels.level[i] = static_cast<int8_t>(i + lowest);
    }
  }
  return levels;
}

}  // namespace kvanta::formats
