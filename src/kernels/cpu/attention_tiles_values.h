// The attention kernels of values by tiles (tiles_amx.h): 64 bytes of a channel's tokens lie in the cache as a column
// of a tile's second operand; weights are the rows of the first one. Included by isa_amx.cc after attention_tiles.h.
#pragma once

#include <cstdint>

#include "formats/code.h"
#include "kernels/cpu/attention_narrow_values.h"
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kColumnChannels = 64;  // that are met at a time: four tiles of 16 channels

// Where the tiles of 64 channels lie: `apart` bytes from one to the next, rows `stride` bytes from each other.
struct ValueTiles {
  const uint8_t* first;
  int64_t apart;
  int64_t stride;
};

// Sums of two terms are kPassRows rows apart.
struct FloatValues {
  static constexpr int kTokens = 32;  // of a tile
  static constexpr bool kInteger = false, kNarrow = false;
  template <int kSum, int kColumns>
  static KVANTA_INLINE void Dot() {
    Tiles::DotBf16<kSum, kFirstOperand, kColumns>();
  }
  static KVANTA_INLINE Lanes::F Join(__m512i upper, __m512i lower) {
    return Lanes::Add(_mm512_castsi512_ps(upper), _mm512_castsi512_ps(lower));
  }
};

// Codes whose units a tile can be loaded from.
template <class Base>
struct PlainValues : Base {
  static constexpr bool kUnpacks = false;
  static KVANTA_INLINE ValueTiles Find(const CellView& cell, int token, int channel, const SlotScales& /*slots*/,
                                       uint8_t* /*room*/) {
    constexpr int kSub = Base::kTokens / kTileRows;  // tokens of a unit
    const int64_t stride = int64_t{cell.head_dim} * 4;
    return {cell.codes + token / kSub * stride + int64_t{channel} * 4, 64, stride};
  }
};
struct Bf16Values : PlainValues<FloatValues> {
  static constexpr const WordOrder& kOrder = kPlainWords;
};

template <const ByteTables& kTables>
struct Fp8Values : FloatValues {
  static constexpr bool kUnpacks = true;
  static constexpr const WordOrder& kOrder = kCrossedWords;
  static KVANTA_INLINE ValueTiles Find(const CellView& cell, int token, int channel, const SlotScales& /*slots*/,
                                       uint8_t* room) {
    const DecodeFp8<kTables> decode;
    const int64_t stride = int64_t{cell.head_dim} * 4;
    const uint8_t* units = cell.codes + token / 4 * stride + int64_t{channel} * 4;
    for (int unit = 0; unit < kTokens / 4; ++unit, units += stride) {
      for (int column = 0; column < 4; ++column) {
        __m512i pairs[2];
        decode.Pairs(_mm512_loadu_si512(units + 64 * column), pairs);
        uint8_t* out = room + column * kTileBytes + unit * 128;
        _mm512_store_si512(out, pairs[0]);
        _mm512_store_si512(out + 64, pairs[1]);
      }
    }
    return {room, kTileBytes, 64};
  }
};

// Signed bytes that meet weights of 16 bits without a sign.
struct WideValues {
  static constexpr int kTokens = 64;
  static constexpr bool kInteger = true, kNarrow = false;
  template <int kSum, int kColumns>
  static KVANTA_INLINE void Dot() {
    Tiles::DotUnsignedSigned<kSum, kFirstOperand, kColumns>();
  }
  static KVANTA_INLINE Lanes::F Join(__m512i upper, __m512i lower) { return JoinTerms(upper, lower); }
};
using Int8Values = PlainValues<WideValues>;

// What the codes of 16 slots are met less: `middle`, one less where the scale is negative.
struct KeepOffsets {
  static KVANTA_INLINE void Offsets(Lanes::F scale, int middle, uint8_t* out) {
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(scale));
    const __m128i middles = _mm_set1_epi8(static_cast<char>(middle));
    const __m128i offsets = _mm_sub_epi8(middles, _mm_maskz_mov_epi8(negative, _mm_set1_epi8(1)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), offsets);
  }
};

// Codes of up to 6 bits become their levels: tiles come in pairs, of the even and of the odd ones of 32 channels.
// kField: 0 for even ones. `slot`: of the first of four whose signs and offsets are the codes'.
template <formats::Code kCode, int kField>
KVANTA_INLINE __m512i TileLevels(__m512i low, __m512i high, const SlotScales& slots, int slot) {
  using Value = NarrowValue<NarrowCodeOf<kCode>, kNegativeScales<kCode>>;
  const __m512i x = Value::template Levels<ValueBytes, kField>(low, high, slots.signs + slot);
  if constexpr (!Value::kStarts) return x;
  if constexpr (!kNegativeScales<kCode>) return ValueBytes::Sub(x, Value::kMiddle);
  return _mm512_sub_epi8(x, Broadcast32(slots.offsets + slot));
}

template <formats::Code kCode>
KVANTA_INLINE ValueTiles UnpackValueTiles(const CellView& cell, int token, int channel, const SlotScales& slots,
                                          uint8_t* room) {
  using Base = NarrowCodeOf<kCode>;
  using B = ValueBytes;
  const int64_t stride = int64_t{cell.head_dim} * Base::kBits / 2;
  const int64_t high = int64_t{cell.head_dim} * Base::kLow / 2;
  const uint8_t* units = cell.codes + token / 4 * stride;
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    const int group = channel / 32 + pair;
    const int slot = (cell.block_scales ? group * 32 / cell.block * cell.page_tokens : 0) + token;
    uint8_t* even = room + 2 * pair * kTileBytes;
    const uint8_t* unit = units;
#pragma GCC unroll 4
    for (int i = 0; i < kTileRows; ++i, unit += stride) {
      const B::V low = B::LoadSets<Base::kLow, false>(unit, group, 32);
      B::V top = low;
      if constexpr (Base::kHigh != 0) top = B::LoadSets<Base::kHigh, false>(unit + high, group, 32);
      const B::V first = TileLevels<kCode, 0>(low, top, slots, slot + 4 * i);
      const B::V second = TileLevels<kCode, 1>(low, top, slots, slot + 4 * i);
      _mm512_store_si512(even + i * 64, first);
      _mm512_store_si512(even + kTileBytes + i * 64, second);
    }
  }
  return {room, kTileBytes, 64};
}

template <formats::Code kCode>
struct NarrowValues {
  static constexpr int kTokens = 64;
  static constexpr bool kInteger = true, kNarrow = true, kUnpacks = true;
  template <int kSum, int kColumns>
  static KVANTA_INLINE void Dot() {
    Tiles::DotUnsignedSigned<kSum, kFirstOperand, kColumns>();
  }
  static KVANTA_INLINE ValueTiles Find(const CellView& cell, int token, int channel, const SlotScales& slots,
                                       uint8_t* room) {
    return UnpackValueTiles<kCode>(cell, token, channel, slots, room);
  }
};

// The scales of slots that share the units of their weights, one behind the other.
KVANTA_INLINE SlotScales* SlotsOf(const ValuePass& pass) {
  static_assert(2 * sizeof(SlotScales) <= kKeptScaleBytes);
  return reinterpret_cast<SlotScales*>(pass.room + kCallRoomBytes + 2 * kKeptCodeBytes);
}

// ---- weights

// 64 integers up to 65535, given as their f32 plus 2^23, as bytes: the upper ones, and, `apart` bytes behind, the lower
// ones.
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
KVANTA_INLINE void PackTwoBytes(const Lanes::F* x, uint8_t* out, int64_t apart) {
  const __m512i order = _mm512_load_si512(kUpperFirst.bytes);
  const auto bytes = [&](int i) {
    return _mm512_permutex2var_epi8(_mm512_castps_si512(x[i]), order, _mm512_castps_si512(x[i + 1]));
  };
  const __m512i first = bytes(0), second = bytes(2);
  _mm512_storeu_si512(out, _mm512_shuffle_i32x4(first, second, 0x44));
  _mm512_storeu_si512(out + apart, _mm512_shuffle_i32x4(first, second, 0xee));
}

inline constexpr int64_t kTermBytes = int64_t{kPassRows} * 64;

// p times the scales of a block as the first operands of its channels, in two terms: [tiles][term][kPassRows] rows.
template <class Values>
KVANTA_INLINE void WeighTiles(const ValuePass& pass, Weights& weights) {
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell), tokens = pass.end - pass.begin;
  const ScalePlane& scales = cell.block_scales ? cell.block_scales : cell.token_scales;
  weights.Place(pass.room, 64, kTileBytes, int64_t{blocks} * kTileBytes);
  alignas(64) float scale[kMaxPageTokens];
  for (int b = 0; b < blocks; ++b) {
    for (int t = 0; t < tokens; t += 16) {
      const Lanes::F x = LoadScales(scales, b * cell.page_tokens + pass.begin + t);
      Lanes::Store(scale + t, Lanes::Mul(x, Lanes::Set1(pass.scale)));
    }
    uint8_t* out = pass.room + b * weights.block_stride;
    const auto product = [&](int row, int t) __attribute__((always_inline)) {
      return Lanes::Mul(Lanes::Load(pass.p + row * kMaxPageTokens + pass.begin + t), Lanes::Load(scale + t));
    };
    if constexpr (!Values::kInteger) {
      for (int row = 0; row < pass.rows; ++row) {
        for (int t = 0; t < tokens; t += 32) {
          PackTwoBf16<Values::kOrder>(product(row, t), product(row, t + 16),
                                      out + (pass.begin + t) / 32 * weights.tile_stride + row * 64, kTermBytes);
        }
      }
    } else {
      constexpr float kLargest = CodeInt8Values::kLargest;
      Lanes::F peaks[kPassRows];
      float largest[kPassRows];
      for (int row = 0; row < pass.rows; ++row) {
        peaks[row] = Lanes::Zero();
        for (int t = 0; t < tokens; t += 16) peaks[row] = Lanes::Max(peaks[row], product(row, t));
      }
      LargestOf(peaks, pass.rows, largest);
      for (int row = 0; row < pass.rows; ++row) {
        const float peak = largest[row] > kSmallestPeak ? largest[row] : kSmallestPeak;
        const Lanes::F inverse = Lanes::Set1(kLargest / peak);
        weights.unit[row][b] = peak / kLargest;
        weights.zero[row][b] = 0;
        for (int t = 0; t < tokens; t += 64) {
          Lanes::F x[4];
          for (int i = 0; i < 4; ++i) x[i] = Lanes::Fma(product(row, t + 16 * i), inverse, Lanes::Set1(0x1p23f));
          PackTwoBytes(x, out + (pass.begin + t) / 64 * weights.tile_stride + row * 64, kTermBytes);
        }
      }
    }
  }
}

// ---- PV

// The sums of four tiles, of 64 channels from `channel` on, into the rows' results.
template <class Values>
KVANTA_INLINE void AddTileSums(const ValuePass& pass, const Weights& weights, const uint8_t* sums, int channel,
                               bool rescale, Prefetcher& prefetch) {
  const CellView& cell = pass.cell;
  const int block = cell.block_scales ? cell.block : cell.head_dim;
  const auto load = [&](int tile, int row) { return _mm512_load_si512(sums + tile * kTileBytes + row * 64); };
  for (int row = 0; row < pass.rows; ++row) {
    prefetch.Steps<4 * kStepsOfRow>();
    Lanes::F dots[4];
    for (int tile = 0; tile < 4; ++tile) {
      const __m512i sum = load(tile, row), other = load(tile, kPassRows + row);
      if constexpr (!Values::kNarrow) {
        dots[tile] = Values::Join(sum, other);
      } else {  // blocks of 16 channels: the upper ones have weights of their own
        dots[tile] = _mm512_cvtepi32_ps(block < 32 ? _mm512_mask_blend_epi32(0xff00, sum, other) : sum);
      }
    }
    if constexpr (Values::kNarrow) {
      Lanes::F in_order[4];
      Bytes16::Interleave(dots[0], dots[1], in_order);
      Bytes16::Interleave(dots[2], dots[3], in_order + 2);
      for (int i = 0; i < 4; ++i) dots[i] = in_order[i];
    }
    const Lanes::F factor = Lanes::Set1(rescale ? pass.rescale[row] : 1.0f);
    float* out = pass.out + row * pass.out_stride + channel;
    for (int i = 0; i < 4; ++i) {
      if constexpr (Values::kInteger) {
        const int b = (channel + 16 * i) / block;
        dots[i] = Lanes::Fma(dots[i], Lanes::Set1(weights.unit[row][b]), Lanes::Set1(weights.zero[row][b]));
      }
      Lanes::Store(out + 16 * i, Lanes::Fma(Lanes::Load(out + 16 * i), factor, dots[i]));
    }
  }
}

// Slots [begin, end) of a page, whole tiles of them.
template <class Values>
__attribute__((noinline)) void AddByTiles(const ValuePass& pass, int begin, int end, const SlotScales& slots,
                                          const Weights& weights, bool rescale, Prefetcher& prefetch) {
  uint8_t* sums = pass.room + weights.tile_stride * (end / Values::kTokens) + kTileBytes;
  uint8_t* room = sums + 4 * kTileBytes;
  uint8_t* kept = pass.room + kCallRoomBytes + kKeptCodeBytes;
  const CellView& cell = pass.cell;
  const int block = cell.block_scales ? cell.block : cell.head_dim;
  for (int channel = 0; channel < cell.head_dim; channel += kColumnChannels) {
    ForTiles<4>([](auto tile) __attribute__((always_inline)) { Tiles::Zero<decltype(tile)::kValue>(); });
    for (int t = begin; t < end; t += Values::kTokens) {
      const int tile_of_page = channel / kColumnChannels * (kMaxPageTokens / Values::kTokens) + t / Values::kTokens;
      uint8_t* unpacked = pass.visit == Visit::kOnly ? room + t / Values::kTokens % 2 * 4 * kTileBytes
                                                     : kept + int64_t{tile_of_page} * 4 * kTileBytes;
      ValueTiles tiles{unpacked, kTileBytes, 64};
      if (!Values::kUnpacks || pass.visit != Visit::kAgain) tiles = Values::Find(cell, t, channel, slots, unpacked);
      const uint8_t* rows = weights.rows + t / Values::kTokens * weights.tile_stride;
      ForTiles<4>([&](auto tile) __attribute__((always_inline)) {
        constexpr int kTile = decltype(tile)::kValue, kColumns = kSecondOperand + kTile % 2;
        constexpr int kStep = Values::kNarrow ? 32 : 16;  // channels that share a first operand
        if (kTile == 0 || (block < kColumnChannels && kTile * 16 % kStep == 0)) {
          Tiles::Load<kFirstOperand>(rows + (channel + kTile * 16) / block * weights.block_stride, 64);
        }
        prefetch.Steps<kStepsOfTile>();
        Tiles::Load<kColumns>(tiles.first + kTile * tiles.apart, tiles.stride);
        Values::template Dot<kTile, kColumns>();
      });
    }
    ForTiles<4>([&](auto tile) __attribute__((always_inline)) {
      constexpr int kTile = decltype(tile)::kValue;
      Tiles::Store<kTile>(sums + kTile * kTileBytes, 64);
    });
    AddTileSums<Values>(pass, weights, sums, channel, rescale, prefetch);
  }
}

template <class Values>
KVANTA_INLINE bool MeetsByTiles(const ValuePass& pass) {
  return pass.cell.head_dim % kHeadStep == 0 && pass.begin % Values::kTokens == 0 && pass.end % Values::kTokens == 0;
}

template <class Values>
KVANTA_INLINE int ValueSteps(const ValuePass& pass, int runs = 1) {
  const int tiles = (pass.end - pass.begin) / Values::kTokens;
  return (tiles * kStepsOfTile + runs * pass.rows * kStepsOfRow) * (pass.cell.head_dim / 16);
}

template <class Values>
KVANTA_INLINE void AccumulateTiles(const ValuePass& pass) {
  Weights weights;
  Prefetcher prefetch{pass.prefetch, ValueSteps<Values>(pass)};
  WeighTiles<Values>(pass, weights);
  AddByTiles<Values>(pass, pass.begin, pass.end, *SlotsOf(pass), weights, true, prefetch);
}

template <formats::Code kCode>
KVANTA_INLINE void AccumulateNarrowTiles(const ValuePass& pass) {
  using Values = NarrowValues<kCode>;
  constexpr int kMiddle = 1 << (formats::CodeBits(kCode) - 1);
  const int blocks = ScaleBlocks(pass.cell);
  const int tokens = pass.end - pass.begin, runs = (tokens + kWeightRun<kCode> - 1) / kWeightRun<kCode>;
  const int weighing = pass.rows * ((blocks + 1) / 2) * (tokens / 64);
  Prefetcher prefetch{pass.prefetch, weighing + ValueSteps<Values>(pass, runs)};
  SlotScales* slots = SlotsOf(pass);
  Weights weights;
  // Blocks of 16 channels, of which a tile meets two, are the halves of its operand.
  weights.Place(pass.room, 64, kTermBytes, (blocks + 1) * kTermBytes);
  SlotRange range{pass.begin, pass.begin};
  for (; range.begin < pass.end; range.begin = range.end, ++slots) {
    const int run_end = (range.begin / kWeightRun<kCode> + 1) * kWeightRun<kCode>;
    range.end = run_end < pass.end ? run_end : pass.end;
    if (pass.visit != Visit::kAgain) LoadSlots<kNegativeScales<kCode>, KeepOffsets>(pass.cell, range, kMiddle, *slots);
    WeighSlots(pass, range, pass.scale * kLevelUnit<kCode>, *slots, weights, prefetch);
    AddByTiles<Values>(pass, range.begin, range.end, *slots, weights, range.begin == pass.begin, prefetch);
  }
}

}  // namespace
}  // namespace kvanta::kernels
