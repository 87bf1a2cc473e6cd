// PV kernels by AMX tiles (tiles_amx.h): the cache stores 64 bytes of a channel's tokens as a column of a second
// operand; the scaled probabilities are the rows of the first one. Included by isa_amx.cc after amx_keys.h.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/subbyte_values.h"
#include "kernels/attention/cpu/x86/amx_keys.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Tiles of 64 channels: `tile_stride` bytes from one to the next, rows `row_stride` bytes apart.
struct ValueTiles {
  const uint8_t* first;
  int64_t tile_stride;
  int64_t row_stride;
};
inline constexpr int kColumnChannels = 64;
inline constexpr int kColumnTiles = kColumnChannels / 16;

// Decodes codes to tiles: of 64 channels and the slots of a tile, consecutive.
using UnpackValueTiles = void (*)(const CellView& cell, int token, int channel, const SlotScales& slots, uint8_t* out);

// Tile products with scaled probabilities of kTerms terms.
struct FloatProbs {
  static constexpr int kTokens = 32;  // tokens of a tile
  static constexpr int kTerms = 2;
  static constexpr bool kInteger = false;
  template <int kSum, int kRows, int kSecond>
  static KVANTA_INLINE void Dot() {
    Tiles::DotBf16<kSum, kRows, kSecond>();
  }
  static KVANTA_INLINE Vec16::F Combine(const uint8_t* row, int64_t lower) {
    return Vec16::Add(_mm512_load_ps(row), _mm512_load_ps(row + lower));
  }
};
struct WideProbs {
  static constexpr int kTokens = 64;
  static constexpr int kTerms = 2;
  static constexpr bool kInteger = true;
  template <int kSum, int kRows, int kSecond>
  static KVANTA_INLINE void Dot() {
    Tiles::DotUnsignedSigned<kSum, kRows, kSecond>();
  }
  static KVANTA_INLINE Vec16::F Combine(const uint8_t* row, int64_t lower) {
    return CombineTerms(_mm512_load_si512(row), _mm512_load_si512(row + lower));
  }
};
struct SubbyteProbs : WideProbs {
  static constexpr int kTerms = 1;
  static KVANTA_INLINE Vec16::F Combine(const uint8_t* row, int64_t /*lower*/) {
    return _mm512_cvtepi32_ps(_mm512_load_si512(row));
  }
};

struct Bf16Values {
  using Probs = FloatProbs;
  static constexpr const WordOrder& kOrder = kInOrderWords;
  static constexpr UnpackValueTiles kUnpack = nullptr;  // tiles are loaded from the cell
};

template <const ByteTables& kTables>
struct Fp8Values {
  using Probs = FloatProbs;
  static constexpr const WordOrder& kOrder = kCrossedWords;
  static void Unpack(const CellView& cell, int token, int channel, const SlotScales& /*slots*/, uint8_t* out) {
    const DecodeFp8<kTables> decode;
    const int64_t stride = int64_t{cell.head_dim} * 4;
    const uint8_t* words = cell.codes + token / 4 * stride + int64_t{channel} * 4;
    for (int word = 0; word < Probs::kTokens / 4; ++word, words += stride, out += 128) {
      for (int column = 0; column < kColumnTiles; ++column) {
        __m512i pairs[2];
        decode.Pairs(_mm512_loadu_si512(words + 64 * column), pairs);
        _mm512_store_si512(out + column * kTileBytes, pairs[0]);
        _mm512_store_si512(out + column * kTileBytes + 64, pairs[1]);
      }
    }
  }
  static constexpr UnpackValueTiles kUnpack = Unpack;
};

struct Int8Values {
  using Probs = WideProbs;
  static constexpr UnpackValueTiles kUnpack = nullptr;
};

// Stores the offsets of the codes of 16 slots: `middle`, or one less where the scale is negative.
struct StoreCodeOffsets {
  static KVANTA_INLINE void Offsets(Vec16::F scale, int middle, uint8_t* out) {
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(scale));
    const __m128i middles = _mm_set1_epi8(static_cast<char>(middle));
    const __m128i offsets = _mm_sub_epi8(middles, _mm_maskz_mov_epi8(negative, _mm_set1_epi8(1)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), offsets);
  }
};

// Decodes codes of up to 6 bits to levels. kField: 0 for the even channels of 32, 1 for the odd ones. slot: the first
// of four slots, whose signs and offsets apply.
template <formats::ElementType kElementType, int kField>
KVANTA_INLINE __m512i TileLevels(__m512i low, __m512i high, const SlotScales& slots, int slot) {
  using Value = SubbyteValue<SubbyteTypeOf<kElementType>, kNegativeScales<kElementType>>;
  const __m512i x = Value::template Levels<ValueBytes, kField>(low, high, slots.signs + slot);
  if constexpr (!Value::kHasInitialSums) return x;
  if constexpr (!kNegativeScales<kElementType>) return ValueBytes::Sub(x, Value::kMiddle);
  return _mm512_sub_epi8(x, Broadcast32(slots.code_offsets + slot));
}

template <formats::ElementType kElementType>
void UnpackValueLevels(const CellView& cell, int token, int channel, const SlotScales& slots, uint8_t* out) {
  using Base = SubbyteTypeOf<kElementType>;
  using B = ValueBytes;
  const int64_t stride = int64_t{cell.head_dim} * Base::kBits / 2;
  const int64_t high = int64_t{cell.head_dim} * Base::kLow / 2;
  const __m512i first_half = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second_half = _mm512_add_epi32(first_half, _mm512_set1_epi32(8));
  const uint8_t* words = cell.codes + token / 4 * stride;
#pragma GCC unroll 2
  for (int pair = 0; pair < kColumnTiles / 2; ++pair, out += 2 * kTileBytes) {
    const int group = channel / 32 + pair;
    const int slot = (cell.block_scales ? group * 32 / cell.block * cell.page_tokens : 0) + token;
    const uint8_t* word = words;
#pragma GCC unroll 4
    for (int i = 0; i < kTileRows; ++i, word += stride) {
      const B::V low = B::LoadSets<Base::kLow, false>(word, group, 32);
      B::V top = low;
      if constexpr (Base::kHigh != 0) top = B::LoadSets<Base::kHigh, false>(word + high, group, 32);
      const B::V even = TileLevels<kElementType, 0>(low, top, slots, slot + 4 * i);
      const B::V odd = TileLevels<kElementType, 1>(low, top, slots, slot + 4 * i);
      _mm512_store_si512(out + i * 64, _mm512_permutex2var_epi32(even, first_half, odd));
      _mm512_store_si512(out + kTileBytes + i * 64, _mm512_permutex2var_epi32(even, second_half, odd));
    }
  }
}

template <formats::ElementType kElementType>
struct SubbyteValues {
  using Probs = SubbyteProbs;
  static constexpr UnpackValueTiles kUnpack = UnpackValueLevels<kElementType>;
};

// Layout of a call with at most kRows query rows as rows of tiles: the rows of a term are kRows rows after those of the
// previous term, in the same tile if there are few.
template <class ProbsType, int kRowsOf>
struct ProbTiles {
  using Probs = ProbsType;
  static constexpr int kRows = kRowsOf;
  static constexpr int64_t kTermBytes = int64_t{kRows} * 64;
  static constexpr int kTiles = Probs::kTerms * kRows > kTileRows ? Probs::kTerms* kRows / kTileRows : 1;
  static constexpr int kUnroll = kTilesUnroll / kTiles;  // column tiles multiplied at a time
};

// ---- scaled probabilities

// Packs 64 integers up to 65535, given as f32 plus 2^23: upper bytes, and lower bytes `lower` bytes after them.
struct PairOrder {
  alignas(64) uint8_t bytes[64];
};
constexpr PairOrder MakePairOrder() {
  PairOrder order{};
  for (int i = 0; i < 32; ++i) {
    order.bytes[i] = static_cast<uint8_t>(4 * i + 1);
    order.bytes[i + 32] = static_cast<uint8_t>(4 * i);
  }
  return order;
}
constexpr PairOrder kUpperFirst = MakePairOrder();
KVANTA_INLINE void PackTwoBytes(const Vec16::F* x, uint8_t* out, int64_t lower) {
  const __m512i order = _mm512_load_si512(kUpperFirst.bytes);
  const auto bytes = [&](int i) {
    return _mm512_permutex2var_epi8(_mm512_castps_si512(x[i]), order, _mm512_castps_si512(x[i + 1]));
  };
  const __m512i first = bytes(0), second = bytes(2);
  _mm512_storeu_si512(out, _mm512_shuffle_i32x4(first, second, 0x44));
  _mm512_storeu_si512(out + lower, _mm512_shuffle_i32x4(first, second, 0xee));
}

// Packs p times the scales of a block as first operands of its channels, in two terms: [tiles][blocks][terms] rows.
template <class Values, class Rows>
KVANTA_INLINE void ScaleTiles(const ValuePass& pass, ScaledProbs& probs) {
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell), tokens = pass.end - pass.begin;
  const ScaleSection& scales = cell.block_scales ? cell.block_scales : cell.token_scales;
  probs.Place(pass.workspace, 64, Rows::kTiles * kTileBytes, int64_t{blocks} * Rows::kTiles * kTileBytes);
  alignas(64) float scale[kMaxPageTokens];
  for (int b = 0; b < blocks; ++b) {
    for (int t = 0; t < tokens; t += 16) {
      const Vec16::F x = LoadScales(scales, b * cell.page_tokens + pass.begin + t);
      Vec16::Store(scale + t, Vec16::Mul(x, Vec16::Set1(pass.scale)));
    }
    uint8_t* out = pass.workspace + b * probs.block_stride;
    const auto product = [&](int row, int t) __attribute__((always_inline)) {
      return Vec16::Mul(Vec16::Load(pass.p + row * kMaxPageTokens + pass.begin + t), Vec16::Load(scale + t));
    };
    if constexpr (!Rows::Probs::kInteger) {
      for (int row = 0; row < pass.rows; ++row) {
        for (int t = 0; t < tokens; t += 32) {
          PackTwoBf16<Values::kOrder>(product(row, t), product(row, t + 16),
                                      out + (pass.begin + t) / 32 * probs.tile_stride + row * 64, Rows::kTermBytes);
        }
      }
    } else {
      constexpr float kMaxOperand = CodeInt8Values::kMaxOperand;
      Vec16::F maxima[kPassRows];
      float largest[kPassRows], inverses[kPassRows];
      for (int row = 0; row < pass.rows; ++row) {
        maxima[row] = Vec16::Zero();
        for (int t = 0; t < tokens; t += 16) maxima[row] = Vec16::Max(maxima[row], product(row, t));
      }
      ReduceMaxima(maxima, pass.rows, kMaxOperand, largest, inverses);
      for (int row = 0; row < pass.rows; ++row) {
        const Vec16::F inverse = Vec16::Set1(inverses[row]);
        probs.scale[row][b] = largest[row] / kMaxOperand;
        probs.offset[row][b] = 0;
        for (int t = 0; t < tokens; t += 64) {
          Vec16::F x[4];
          for (int i = 0; i < 4; ++i) x[i] = Vec16::Fma(product(row, t + 16 * i), inverse, Vec16::Set1(0x1p23f));
          PackTwoBytes(x, out + (pass.begin + t) / 64 * probs.tile_stride + row * 64, Rows::kTermBytes);
        }
      }
    }
  }
}

// ---- PV

// Iterates over the blocks of consecutive column tiles.
struct BlockIterator {
  int block;  // channels
  int left = block;
  int index = 0;

  // Advances by one column tile; true if it belongs to another block.
  KVANTA_INLINE bool Next() {
    left -= 16;
    if (left > 0) return false;
    left = block;
    ++index;
    return true;
  }
};

// Adds the sums of the column tiles from `channel` on, whose blocks begin at `block`, to the rows' outputs.
template <class Rows>
__attribute__((noinline)) void AddTileSums(const ValuePass& pass, const ScaledProbs& probs, const uint8_t* sums,
                                           int channel, BlockIterator block, bool rescale, Prefetcher& prefetch) {
  constexpr int kUnroll = Rows::kUnroll;
  int blocks[kUnroll];
  for (int i = 0; i < kUnroll; ++i, block.Next()) blocks[i] = block.index;
  float* out = pass.out + channel;
  for (int row = 0; row < pass.rows; ++row, sums += 64, out += pass.out_stride) {
    prefetch.Steps<kUnroll * kStepsOfRow>();
    const Vec16::F factor = Vec16::Set1(rescale ? pass.rescale[row] : 1.0f);
#pragma GCC unroll 4
    for (int i = 0; i < kUnroll; ++i) {
      Vec16::F dot = Rows::Probs::Combine(sums + i * Rows::kTiles * kTileBytes, Rows::kTermBytes);
      if constexpr (Rows::Probs::kInteger) {
        const int b = blocks[i];
        dot = Vec16::Fma(dot, Vec16::Set1(probs.scale[row][b]), Vec16::Set1(probs.offset[row][b]));
      }
      Vec16::Store(out + 16 * i, Vec16::Fma(Vec16::Load(out + 16 * i), factor, dot));
    }
  }
}

// Accumulates slots [begin, end) of a page, whole tiles. unpack: null where tiles are loaded from the cell. kDeferred:
// the sums stay in their tiles until the previous ones have been processed (2 % slower for fp8 decode with few rows).
template <class Rows>
__attribute__((noinline)) void AddByTiles(const ValuePass& pass, UnpackValueTiles unpack, int begin, int end,
                                          const SlotScales& slots, const ScaledProbs& probs, bool rescale,
                                          Prefetcher& prefetch) {
  using Probs = typename Rows::Probs;
  constexpr int kTokens = Probs::kTokens, kUnroll = Rows::kUnroll;
  constexpr int kTilesOfPage = kMaxPageTokens / kTokens;
  constexpr bool kDeferred = Rows::kRows == kTileRows;
  const CellView& cell = pass.cell;
  const int64_t stride = int64_t{cell.head_dim} * 4;
  BlockIterator first_block{cell.block_scales ? cell.block : cell.head_dim};
  BlockIterator pending_block = first_block;
  const bool unpacks = unpack != nullptr && pass.workspace_use != WorkspaceUse::kReuse;
  int pending = -1;  // channel of the columns whose sums are stored
  uint8_t* sums = pass.workspace + probs.tile_stride * (end / kTokens);
  uint8_t* workspace = sums + kTilesUnroll * kTileBytes;
  for (int channel = 0; channel < cell.head_dim; channel += kColumnChannels) {
    ValueTiles tiles{cell.codes + int64_t{channel} * 4, 64, stride};
    int64_t slot_stride = kTileRows * stride;  // between tiles of slots
    if (unpack != nullptr) {
      if (pass.workspace_use != WorkspaceUse::kNone) {
        workspace =
            pass.workspace + kCallWorkspaceBytes + kReusedCodeBytes + int64_t{channel} / 16 * kTilesOfPage * kTileBytes;
      }
      slot_stride = kColumnTiles * kTileBytes;
      tiles = {workspace, kTileBytes, 64};
    }
    for (int column = 0; column < kColumnTiles; column += kUnroll) {
      ForTiles<kTilesUnroll>([](auto i) __attribute__((always_inline)) { Tiles::Zero<decltype(i)::kValue>(); });
      BlockIterator block = first_block;
      for (int t = begin; t < end; t += kTokens) {
        block = first_block;
        bool is_new_block = true;
        const uint8_t* rows = probs.rows + t / kTokens * probs.tile_stride;
        const uint8_t* columns = tiles.first + t / kTokens * slot_stride + column * tiles.tile_stride;
        if (unpacks && column == 0) unpack(cell, t, channel, slots, workspace + t / kTokens * slot_stride);
        ForTiles<kUnroll>([&](auto i) __attribute__((always_inline)) {
          constexpr int kColumn = decltype(i)::kValue;
          if (is_new_block) {
            const uint8_t* operands = rows + block.index * probs.block_stride;
            ForTiles<Rows::kTiles>([&](auto term) __attribute__((always_inline)) {
              constexpr int kTerm = decltype(term)::kValue;
              Tiles::Load<kFirstOperand + kTerm>(operands + kTerm * kTileBytes, 64);
            });
          }
          Tiles::Load<kSecondOperand + kColumn % 2>(columns + kColumn * tiles.tile_stride, tiles.row_stride);
          ForTiles<Rows::kTiles>([&](auto term) __attribute__((always_inline)) {
            constexpr int kTerm = decltype(term)::kValue;
            prefetch.Steps<kStepsOfTile>();
            Probs::template Dot<kColumn * Rows::kTiles + kTerm, kFirstOperand + kTerm, kSecondOperand + kColumn % 2>();
          });
          is_new_block = block.Next();
        });
      }
      if (kDeferred && pending >= 0) AddTileSums<Rows>(pass, probs, sums, pending, pending_block, rescale, prefetch);
      ForTiles<kTilesUnroll>([&](auto i) __attribute__((always_inline)) {
        constexpr int kSum = decltype(i)::kValue;
        Tiles::Store<kSum>(sums + kSum * kTileBytes, 64);
      });
      pending = channel + column * 16;
      pending_block = first_block;
      first_block = block;
      if (!kDeferred) AddTileSums<Rows>(pass, probs, sums, pending, pending_block, rescale, prefetch);
    }
  }
  if (kDeferred) AddTileSums<Rows>(pass, probs, sums, pending, pending_block, rescale, prefetch);
}

// True if the slots are whole tiles, and blocks whole column tiles.
template <class Values>
KVANTA_INLINE bool SupportsAmx(const ValuePass& pass) {
  constexpr int kTokens = Values::Probs::kTokens;
  return pass.cell.head_dim % kHeadStep == 0 && pass.begin % kTokens == 0 && pass.end % kTokens == 0;
}

template <class Rows>
KVANTA_INLINE int ValueSteps(const ValuePass& pass, int ranges = 1) {
  const int tiles = (pass.end - pass.begin) / Rows::Probs::kTokens;
  return (tiles * Rows::kTiles * kStepsOfTile + ranges * pass.rows * kStepsOfRow) * (pass.cell.head_dim / 16);
}

template <class Values, int kRows>
KVANTA_INLINE void AccumulateTilesOf(const ValuePass& pass) {
  using Rows = ProbTiles<typename Values::Probs, kRows>;
  ScaledProbs probs;
  if constexpr (kRows == kTileRows) KeepTmulAwake();
  Prefetcher prefetch{pass.prefetch, ValueSteps<Rows>(pass)};
  ScaleTiles<Values, Rows>(pass, probs);
  AddByTiles<Rows>(pass, Values::kUnpack, pass.begin, pass.end, *SlotsOf(pass), probs, true, prefetch);
}
template <class Values>
KVANTA_INLINE void AccumulateTiles(const ValuePass& pass) {
  constexpr int kFewRows = kTileRows / 2;
  if (pass.rows <= kFewRows) return AccumulateTilesOf<Values, kFewRows>(pass);
  AccumulateTilesOf<Values, kTileRows>(pass);
}

template <formats::ElementType kElementType>
KVANTA_INLINE void AccumulateSubbyteTiles(const ValuePass& pass) {
  using Rows = ProbTiles<SubbyteProbs, kTileRows>;
  constexpr int kMiddle = 1 << (formats::CodeBits(kElementType) - 1);
  const int blocks = ScaleBlocks(pass.cell);
  const int tokens = pass.end - pass.begin;
  const int ranges = (tokens + kSlotsPerScale<kElementType> - 1) / kSlotsPerScale<kElementType>;
  const int scale_steps = pass.rows * ((blocks + 1) / 2) * (tokens / 64);
  Prefetcher prefetch{pass.prefetch, scale_steps + ValueSteps<Rows>(pass, ranges)};
  ScaledProbs probs;
  KeepTmulAwake();
  probs.Place(pass.workspace, 64, kTileBytes, int64_t{blocks} * kTileBytes);
  ForSlotRanges<kElementType>(pass, [&](SlotRange range, SlotScales& slots) {
    if (pass.workspace_use != WorkspaceUse::kReuse)
      LoadSlots<kNegativeScales<kElementType>, StoreCodeOffsets>(pass.cell, range, kMiddle, slots);
    ScaleSlots<InitialSums::kNone>(pass, range, pass.scale * kLevelScale<kElementType>, kMiddle, slots, probs,
                                   prefetch);
    AddByTiles<Rows>(pass, SubbyteValues<kElementType>::kUnpack, range.begin, range.end, slots, probs,
                     range.begin == pass.begin, prefetch);
  });
}

}  // namespace
}  // namespace kvanta::kernels
