// Element types below 8 bits whose levels need a whole byte (Lloyd-Max): codes are decoded to bytes on the stack (K: 16
// tokens at a time, V: a page) by a lookup table, then the int8 kernels run over them. Included by isa_<isa>.cc after
// values.h.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/values.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

using Word4 = uint32_t __attribute__((may_alias));

template <formats::ElementType kElementType>
constexpr formats::CodeLevels kCodeLevels = formats::Levels(kElementType);

// Extracts the four fields of kBits bits at `shift` from a word.
template <int kBits>
KVANTA_INLINE uint32_t Fields(uint32_t word, int shift) {
  return (word >> shift) & (((1U << kBits) - 1U) * 0x01010101U);
}

// E3M2 fields to E4M3: the exponent's bias is 7 instead of 3, and subnormal numbers become normal ones.
KVANTA_INLINE void E3m2ToE4m3(uint8_t* bytes, int n) {
  for (int i = 0; i < n; ++i) {
    const int field = bytes[i], magnitude = field & 31;
    const int subnormal = (magnitude > 0 ? 0x18 : 0) + (magnitude > 1 ? 8 : 0) + (magnitude > 2 ? 4 : 0);
    bytes[i] = static_cast<uint8_t>((field & 32) << 2 | (magnitude < 4 ? subnormal : 2 * magnitude + 0x20));
  }
}

// Fields to the bytes of their levels.
template <formats::ElementType kElementType>
KVANTA_INLINE void FieldsToLevels(Word4* words, int n) {
  if constexpr (kElementType == formats::ElementType::kE3M2) {
    E3m2ToE4m3(reinterpret_cast<uint8_t*>(words), n);
  } else {
    LookUpBytes(kCodeLevels<kElementType>.level, reinterpret_cast<uint8_t*>(words), n);
  }
}

// The codes of a group of 16 tokens, as lines of int8: line L holds channels 8 (L / 2) + 2 b + L % 2, b = 0..3.
template <formats::ElementType kElementType>
KVANTA_INLINE void UnpackKeys(const uint8_t* group, int head_dim, Word4* out) {
  constexpr formats::ElementTypeInfo kInfo = formats::Info(kElementType);
  constexpr int kLow = kInfo.low_bits, kHigh = kInfo.high_bits;
  const Word4* low = reinterpret_cast<const Word4*>(group);
  const Word4* high = low + int64_t{16} * head_dim * kLow / 32;
  for (int line = 0; line < head_dim / 4; ++line) {
    const Word4* from = low + line / (8 / kLow) * 16;
    const int shift = line % (8 / kLow) * kLow;
    Word4* to = out + line * 16;
    for (int i = 0; i < 16; ++i) to[i] = Fields<kLow>(from[i], shift);
    if constexpr (kHigh != 0) {
      const Word4* top = high + line / (8 / kHigh) * 16;
      const int top_shift = line % (8 / kHigh) * kHigh;
      for (int i = 0; i < 16; ++i) to[i] |= Fields<kHigh>(top[i], top_shift) << kLow;
    }
  }
  FieldsToLevels<kElementType>(out, 16 * head_dim);
}

// Decodes tokens [4 quad, 4 end_quad) of a cell to the order of int8 cells.
template <formats::ElementType kElementType>
KVANTA_INLINE void UnpackValues(const uint8_t* codes, int head_dim, int quad, int end_quad, Word4* out) {
  constexpr formats::ElementTypeInfo kInfo = formats::Info(kElementType);
  constexpr int kLow = kInfo.low_bits, kHigh = kInfo.high_bits;
  const int row_bytes = head_dim * (kLow + kHigh) / 8;
  for (; quad < end_quad; ++quad, out += head_dim) {
    const Word4* low = reinterpret_cast<const Word4*>(codes) + int64_t{quad} * row_bytes;
    const Word4* high = low + head_dim * kLow / 8;
    for (int octet = 0; octet < head_dim / 8; ++octet) {
      const Word4* from = low + octet / (4 / kLow) * 4;
      const int shift = octet % (4 / kLow) * 2 * kLow;
      Word4* to = out + octet * 8;
      for (int i = 0; i < 4; ++i) {
        to[2 * i] = Fields<kLow>(from[i], shift);
        to[2 * i + 1] = Fields<kLow>(from[i], shift + kLow);
      }
      if constexpr (kHigh != 0) {
        const Word4* top = high + octet / (4 / kHigh) * 4;
        const int top_shift = octet % (4 / kHigh) * 2 * kHigh;
        for (int i = 0; i < 4; ++i) {
          to[2 * i] |= Fields<kHigh>(top[i], top_shift) << kLow;
          to[2 * i + 1] |= Fields<kHigh>(top[i], top_shift + kHigh) << kLow;
        }
      }
    }
    FieldsToLevels<kElementType>(out, 4 * head_dim);
  }
}

// The query in the channels' order of UnpackKeys(), prepared by the expanded type's kernel.
template <formats::ElementType kElementType, auto kPrepare>
float PrepareLookup8(const float* query, int head_dim, int block, uint8_t* out) {
  alignas(64) float x[kMaxHeadDim];
  for (int octet = 0; octet < head_dim; octet += 8) {
    for (int i = 0; i < 8; ++i) x[octet + i] = query[octet + i % 4 * 2 + i / 4];
  }
  return kPrepare(x, head_dim, block, out) * kCodeLevels<kElementType>.unit;
}

// Not inlined: in every instance it would be most of the unit's code and compile time.
[[maybe_unused]] __attribute__((noinline)) void ScoreBytes(const KeyPass& pass, const Word4* lines, int group,
                                                           Prefetcher& prefetch) {
  ScoreGroups<CodeInt8, 1>(pass, reinterpret_cast<const uint8_t*>(lines), group, prefetch);
}

template <formats::ElementType kElementType>
KVANTA_INLINE void ScoreLookup8Group(const KeyPass& pass, int group, Prefetcher& prefetch) {
  alignas(64) Word4 lines[4 * kMaxHeadDim];
  constexpr int kBits = formats::CodeBits(kElementType);
  const int64_t group_bytes = int64_t{16} * pass.cell.head_dim * kBits / 8;
  UnpackKeys<kElementType>(pass.cell.codes + group * group_bytes, pass.cell.head_dim, lines);
  ScoreBytes(pass, lines, group, prefetch);
}

template <formats::ElementType kElementType>
void ScoreLookup8(const KeyPass& pass) {
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, QueryTiles(pass.rows), 1, CodeInt8::kSub * kLinesOfStep)};
  for (int group = 0; group < pass.groups; ++group) ScoreLookup8Group<kElementType>(pass, group, prefetch);
}

// Keys of a page, expanded for another type's kernel.
template <formats::ElementType kElementType, auto kScore>
void ScoreExpanded(const KeyPass& pass) {
  alignas(64) Word4 words[kMaxPageTokens / 4 * kMaxHeadDim];
  const int head_dim = pass.cell.head_dim;
  for (int group = 0; group < pass.groups; ++group) {
    const int64_t group_bytes = int64_t{16} * head_dim * formats::CodeBits(kElementType) / 8;
    UnpackKeys<kElementType>(pass.cell.codes + group * group_bytes, head_dim, words + int64_t{4} * group * head_dim);
  }
  KeyPass expanded = pass;
  expanded.cell.codes = reinterpret_cast<const uint8_t*>(words);
  kScore(expanded);
}

// ---- PV

template <formats::ElementType kElementType, auto kAccumulate>
void AccumulateLookup8(const ValuePass& pass) {
  alignas(64) Word4 words[kMaxPageTokens / 4 * kMaxHeadDim];
  const int quad = pass.begin / 4, end_quad = (pass.end + 3) / 4;
  UnpackValues<kElementType>(pass.cell.codes, pass.cell.head_dim, quad, end_quad,
                             words + int64_t{quad} * pass.cell.head_dim);
  ValuePass bytes = pass;
  bytes.cell.codes = reinterpret_cast<const uint8_t*>(words);
  bytes.scale *= kCodeLevels<kElementType>.unit;
  kAccumulate(bytes);
}

}  // namespace
}  // namespace kvanta::kernels
