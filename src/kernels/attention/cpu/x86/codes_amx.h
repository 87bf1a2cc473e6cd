// Keys as AMX tiles (tiles_amx.h), for each element type: decoding of a group of 16 tokens, the query operands, and the
// conversion of their dots. Included by isa_amx.cc.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/subbyte_codes.h"
#include "kernels/attention/cpu/subbyte_keys.h"
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/tiles_amx.h"
#include "kernels/cpu/x86/word_order.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kStepsOfTile = 4;  // prefetcher steps per tile product
inline constexpr int kStepsOfRow = 2;   // prefetcher steps per row of sums that is read back: 16 tokens or 16 channels
inline constexpr int kHeadStep = 64;    // head_dim must be a multiple of this

// The TMUL powers down after about 2,000 cycles without a product and takes 1,000 to wake up (measured; undocumented;
// tile loads do not count): called where long stretches of other work separate products. The operands do not matter.
KVANTA_INLINE void KeepTmulAwake() {
  Tiles::DotSignedSigned<0, kFirstOperand, kSecondOperand>();
}

// ---- operands

constexpr WordOrder kCrossedWords = MakeWordOrder(true);

// Rounds 32 f32 to the nearest bf16 (ties away from 0), in the order of kOrder; x becomes the remainders.
template <const WordOrder& kOrder>
KVANTA_INLINE __m512i SplitBf16(__m512* x) {
  __m512i rounded[2];
  for (int i = 0; i < 2; ++i) {
    rounded[i] = _mm512_add_epi32(_mm512_castps_si512(x[i]), _mm512_set1_epi32(0x8000));
    const __m512i upper = _mm512_and_si512(rounded[i], _mm512_set1_epi32(-0x10000));
    x[i] = _mm512_sub_ps(x[i], _mm512_castsi512_ps(upper));
  }
  return _mm512_permutex2var_epi16(rounded[0], _mm512_load_si512(kOrder.words), rounded[1]);
}

// Stores two bf16 terms of 32 f32, the second `lower` bytes after the first.
template <const WordOrder& kOrder>
KVANTA_INLINE void PackTwoBf16(__m512 first, __m512 second, uint8_t* out, int64_t lower) {
  __m512 x[2] = {first, second};
  _mm512_storeu_si512(out, SplitBf16<kOrder>(x));
  _mm512_storeu_si512(out + lower, SplitBf16<kOrder>(x));
}

// Prepares a query in two terms: for each chunk of a tile's channels, 64 bytes of upper terms, then 64 of lower ones.
template <class Keys>
float PrepareTwoTerms(const float* query, int head_dim, int /*block*/, uint8_t* out) {
  alignas(64) float x[kMaxHeadDim];
  Vec16::F sum = Vec16::Zero(), max = Vec16::Zero();
  for (int c = 0; c < head_dim; c += 16) {
    const Vec16::F part = Vec16::Load(query + c);
    sum = Vec16::Add(sum, part);
    max = Vec16::Max(max, Vec16::Abs(part));
    Vec16::Store(x + c, part);
  }
  const float scale = Keys::Pack(x, head_dim, max, out);
  return scale + 0 * Vec16::Sum(sum);  // NaN and infinities propagate
}
inline int64_t TwoTermBytes(int head_dim) {
  return RoundUp(int64_t{4} * head_dim, 64);  // bytes for bf16; integers take half
}

// ---- keys by element type: 16 tokens of a chunk of kChannels channels are a tile

// Tiles of a page, 1 KiB each, and the distances in bytes between consecutive groups and consecutive chunks.
struct KeyTiles {
  const uint8_t* first;
  int64_t group_stride;
  int64_t chunk_stride;
};

// Decodes codes to tiles: of `groups` groups from `group` on, consecutive.
using UnpackKeyTiles = void (*)(const CellView& cell, int group, int groups, int chunk, uint8_t* out);

// Tile products of an operand type. Combine() converts a row of sums, and the row of the lower terms `lower` bytes
// after it, to f32.
struct FloatDots {
  static constexpr int kTerms = 2;
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void Dot() {
    Tiles::DotBf16<kSum, kRows, kColumns>();
  }
  static KVANTA_INLINE Vec16::F Combine(const uint8_t* row, int64_t lower) {
    return Vec16::Add(_mm512_load_ps(row), _mm512_load_ps(row + lower));
  }
};
struct WideDots {
  static constexpr int kTerms = 2;
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void Dot() {
    Tiles::DotSignedSigned<kSum, kRows, kColumns>();
  }
  static KVANTA_INLINE Vec16::F Combine(const uint8_t* row, int64_t lower) {
    return CombineTerms(_mm512_load_si512(row), _mm512_load_si512(row + lower));
  }
};
struct SubbyteDots {
  static constexpr int kTerms = 1;
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void Dot() {
    Tiles::DotSignedSigned<kSum, kRows, kColumns>();
  }
  static KVANTA_INLINE Vec16::F Combine(const uint8_t* row, int64_t /*lower*/) {
    return _mm512_cvtepi32_ps(_mm512_load_si512(row));
  }
};

struct FloatKeys {
  static constexpr int kChannels = 32;  // channels of a tile
  static constexpr int kBlock = 32;     // smallest block of channels with a scale
  using Dots = FloatDots;
  template <const WordOrder& kOrder>
  static KVANTA_INLINE float PackIn(const float* x, int head_dim, uint8_t* out) {
    for (int c = 0; c < head_dim; c += 32, out += 128) {
      PackTwoBf16<kOrder>(_mm512_load_ps(x + c), _mm512_load_ps(x + c + 16), out, 64);
    }
    return 1.0f;
  }
};

struct Bf16Keys : FloatKeys {
  static constexpr UnpackKeyTiles kUnpack = nullptr;  // tiles are loaded from the cell
  static KVANTA_INLINE float Pack(const float* x, int head_dim, Vec16::F /*max*/, uint8_t* out) {
    return PackIn<kInOrderWords>(x, head_dim, out);
  }
  static constexpr int kBytes = 2;  // bytes of an element
};

template <const ByteTables& kTables>
struct Fp8Keys : FloatKeys {
  static KVANTA_INLINE float Pack(const float* x, int head_dim, Vec16::F /*max*/, uint8_t* out) {
    return PackIn<kCrossedWords>(x, head_dim, out);
  }
  static void Unpack(const CellView& cell, int group, int groups, int chunk, uint8_t* out) {
    const DecodeFp8<kTables> decode;
    const uint8_t* lines = cell.codes + int64_t{group} * cell.head_dim * 16 + int64_t{chunk} * kTileBytes / 2;
    for (int g = 0; g < groups; ++g, lines += int64_t{cell.head_dim} * 16) {
      for (int line = 0; line < 8; ++line, out += 128) {
        __m512i pairs[2];
        decode.Pairs(_mm512_loadu_si512(lines + line * 64), pairs);
        _mm512_store_si512(out, pairs[0]);
        _mm512_store_si512(out + 64, pairs[1]);
      }
    }
  }
  static constexpr UnpackKeyTiles kUnpack = Unpack;
};

// Signed bytes, multiplied by 16-bit operands.
struct WideKeys {
  static constexpr int kChannels = 64, kBlock = 32;
  using Dots = WideDots;
  template <bool kIsEvenFirst>
  static KVANTA_INLINE float PackIn(const float* x, int head_dim, Vec16::F max, uint8_t* out) {
    const Quantizer quantizer = QuantizerOf<WideKeys>(max);
    for (int c = 0; c < head_dim; c += 16) {
      const __m512i all = _mm512_cvtps_epi32(Vec16::Mul(Vec16::Load(x + c), Vec16::Set1(quantizer.inverse)));
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(128)), 8);
      const __m512i lower = _mm512_sub_epi32(all, _mm512_slli_epi32(upper, 8));
      uint8_t* to = out + c / 64 * 128 + c % 64;
      const __m512i terms[2] = {upper, lower};
      for (int i = 0; i < 2; ++i) {
        __m128i bytes = _mm512_cvtepi32_epi8(terms[i]);
        if constexpr (kIsEvenFirst) {
          bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 64 * i), bytes);
      }
    }
    return quantizer.scale;
  }
};

struct Int8Keys : WideKeys {
  static constexpr UnpackKeyTiles kUnpack = nullptr;
  static constexpr int kBytes = 1;
  static KVANTA_INLINE float Pack(const float* x, int head_dim, Vec16::F max, uint8_t* out) {
    return PackIn<false>(x, head_dim, max, out);
  }
};

// Decodes codes of up to 6 bits to bytes, 64 channels. Levels that are not consecutive integers come from a table;
// others are the field less kOffset.
template <formats::ElementType kElementType, int kOffset>
void UnpackKeyLevels(const CellView& cell, int group, int groups, int chunk, uint8_t* out) {
  using Base = SubbyteTypeOf<kElementType>;
  using B = Bytes16;
  constexpr bool kTable = kElementType == formats::ElementType::kE2M1 || !IsSubbyte(kElementType);
  static constexpr SubbyteLevels kLevelTable = SubbyteLevelsOf(kElementType);
  constexpr int kLow = Base::kLow, kHigh = Base::kHigh, kLowFields = 8 / kLow;
  constexpr int kHighFields = kHigh != 0 ? 8 / (kHigh + (kHigh == 0)) : 1;
  for (int g = 0; g < groups; ++g, out += kTileBytes) {
    const uint8_t* low = cell.codes + int64_t{group + g} * cell.head_dim * Base::kBits * 2;
    const uint8_t* high = low + int64_t{cell.head_dim} * kLow * 2 + int64_t{chunk} * 128 * kHigh;
    low += int64_t{chunk} * 128 * kLow;
#pragma GCC unroll 16
    for (int line = 0; line < kTileRows; ++line) {
      const B::V word = B::Load(low + line / kLowFields * 64);
      B::V top = word;
      if constexpr (kHigh != 0) top = B::Load(high + line / kHighFields * 64);
      const int shift = line % kLowFields * kLow;
      B::V x;
      if constexpr (kTable && kHigh == 0) {
        x = Base::template LookUp<B>(word, shift, kLevelTable.level);
      } else {
        x = Base::template Fields<B>(word, shift, top, line % kHighFields * kHigh);
        if constexpr (kTable) x = B::LookUp(x, kLevelTable.level);
        if constexpr (!kTable && kOffset != 0) x = B::Sub(x, kOffset);
      }
      _mm512_store_si512(out + line * 64, x);
    }
  }
}

template <formats::ElementType kElementType>
struct LloydKeys : WideKeys {
  static constexpr UnpackKeyTiles kUnpack = UnpackKeyLevels<kElementType, 0>;
  static KVANTA_INLINE float Pack(const float* x, int head_dim, Vec16::F max, uint8_t* out) {
    return PackIn<true>(x, head_dim, max, out) * kLevelScale<kElementType>;
  }
};

// Bytes multiplied by 8-bit operands, prepared by PrepareSubbyte(). The bytes are levels, so dots need no bias.
template <formats::ElementType kElementType, int kOffset = kLevelOffset<kElementType>>
struct SubbyteKeys {
  static constexpr int kChannels = 64, kBlock = 16;
  static constexpr UnpackKeyTiles kUnpack = UnpackKeyLevels<kElementType, kOffset>;
  using Dots = SubbyteDots;
};

}  // namespace
}  // namespace kvanta::kernels
