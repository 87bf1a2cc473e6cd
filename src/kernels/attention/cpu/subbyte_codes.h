// Integer and e2m1 codes of up to 6 bits, one source for all units over the byte vectors of codes_<isa>.h: fields are
// unpacked to bytes in registers and multiplied by 8-bit operands; sums are exact in int32. Byte products take one
// unsigned and one signed factor: for keys the codes are unsigned, with an offset that a bias removes; for values the
// probabilities are unsigned and the codes signed. 8-bit operands lose less than these codes do (test
// SubbyteOperandsAddLittle) and cost half of 16-bit ones.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

// Bytes that fields decode to: level + offset, from 0 to `max_byte`, or the level.
struct SubbyteLevels {
  alignas(64) uint8_t byte[64];   // bytes of the first 16 fields, repeated four times
  alignas(64) uint8_t level[64];  // in two's complement
  int offset;
  int max_byte;
};

constexpr SubbyteLevels SubbyteLevelsOf(formats::ElementType code) {
  const formats::CodeLevels levels = formats::Levels(code);
  const int count = 1 << formats::CodeBits(code);
  SubbyteLevels result{.byte = {}, .level = {}, .offset = 0, .max_byte = 0};
  for (int field = 0; field < count; ++field) {
    if (-levels.level[field] > result.offset) result.offset = -levels.level[field];
  }
  for (int field = 0; field < count; ++field) {
    const int byte = levels.level[field] + result.offset;
    if (byte > result.max_byte) result.max_byte = byte;
    for (int i = field; field < 16 && i < 64; i += 16) {
      result.byte[i] = static_cast<uint8_t>(byte);
      result.level[i] = static_cast<uint8_t>(levels.level[field]);
    }
  }
  return result;
}

// Common part of keys and values of a code. Codes with the same sections whose bytes are their fields share one type.
template <int kLowBits, int kHighBits, bool kIsE2M1>
struct SubbyteCode {
  static constexpr bool kInteger = true;
  static constexpr int kOperandBytes = 1;
  static constexpr int kLow = kLowBits, kHigh = kHighBits, kBits = kLow + kHigh;
  static constexpr SubbyteLevels kLevels = SubbyteLevelsOf(formats::ElementType::kE2M1);  // only where kLevelsOfE2M1
  static constexpr bool kLevelsOfE2M1 = kIsE2M1;

  // Looks up the fields at bit `shift` of `section` in a table of 16 entries, repeated four times.
  template <class B>
  static KVANTA_INLINE typename B::V LookUp(typename B::V section, int shift, const uint8_t* table) {
    return B::LookUp(shift == 0 ? section : B::Right(section, shift), table);
  }
  // Combines fields of `low` at bit `shift` and of `high` at bit `high_shift` into bytes.
  template <class B>
  static KVANTA_INLINE typename B::V Fields(typename B::V low, int shift, typename B::V high, int high_shift) {
    typename B::V x = B::And(shift == 0 ? low : B::Right(low, shift), (1 << kLow) - 1);
    if constexpr (kHigh != 0) {
      constexpr int kMask = ((1 << kHigh) - 1) << kLow;
      x = B::Or(
          x, B::And(high_shift > kLow ? B::Right(high, high_shift - kLow) : B::Left(high, kLow - high_shift), kMask));
    }
    return x;
  }

  // Number of products of bytes of magnitudes up to x and y that a partial sum can hold before it is added to the
  // 32-bit sum: a power of 2.
  template <class B>
  static constexpr int PartialLength(int64_t x, int64_t y) {
    int partial = 1;
    while (2 * partial * 2 * x * y <= B::kMaxSum && partial < 1024) partial *= 2;
    return partial;
  }
};

template <formats::ElementType kElementType>
using SubbyteTypeOf = SubbyteCode<formats::Info(kElementType).low_bits, formats::Info(kElementType).high_bits,
                                  kElementType == formats::ElementType::kE2M1>;

// Query operands: signed bytes, of every 8 the even ones first, the order in which fields are extracted.
struct SubbyteQuery {
  static constexpr bool kInteger = true;
  static constexpr int kOperandBytes = 1;
  static constexpr float kMaxOperand = kMaxByteQuery;
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { Bytes16::PackEvenFirst(x, out); }
};

// K: a line holds one word of each of 16 tokens; equal fields of its bytes are four channels.
template <class Base>
struct SubbyteKey : Base {
  static constexpr int kMinBits = Base::kHigh != 0 ? Base::kHigh : Base::kLow;
  static constexpr int kStep = 32 / kMinBits;  // channels of a word of the narrowest section
  static constexpr int kBlock = Base::kLevelsOfE2M1 ? 16 : 32;
  static constexpr int kManyRows = ValueBytes::kManyRows;  // share unpacked codes
  static constexpr int kChannelsOfStep = 8;                // channels per prefetcher step
  static constexpr int kMaxByte = Base::kLevelsOfE2M1 ? Base::kLevels.max_byte : (1 << Base::kBits) - 1;

  // Dot products of channels [0, kChannels), a multiple of kStep, of 16 tokens with `operands`. low, high: the sections
  // from the first channel on. *initial[r]: initial value of row r's sums. sums[r * kGroups + g]: row r with the g-th
  // group of tokens, whose lines begin group_bytes after the previous group's.
  template <int kGroups, int kRows, int kChannels, class B = Bytes16>
  static KVANTA_INLINE void Dot(const uint8_t* low, const uint8_t* high, int64_t group_bytes,
                                const uint8_t* const* operands, const int32_t* const* initial, typename B::Sum* sums,
                                Prefetcher& prefetch) {
    constexpr int kPartialLength = Base::template PartialLength<B>(kMaxByte, 127);  // in lines
    constexpr int kLines = kChannels / 4;
    constexpr int kLowFields = 8 / Base::kLow, kHighFields = 8 / kMinBits;
    typename B::Accumulator partial[kRows * kGroups];
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) {
      if (line == 0) prefetch.template Steps<kChannels / kChannelsOfStep>();
      typename B::V x[kGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        const typename B::V word = B::Load(low + g * group_bytes + line / kLowFields * 64);
        typename B::V top = word;
        if constexpr (Base::kHigh != 0) top = B::Load(high + g * group_bytes + line / kHighFields * 64);
        const int shift = line % kLowFields * Base::kLow;
        if constexpr (Base::kLevelsOfE2M1) {
          x[g] = Base::template LookUp<B>(word, shift, Base::kLevels.byte);
        } else {
          x[g] = Base::template Fields<B>(word, shift, top, line % kHighFields * Base::kHigh);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows * kGroups; ++i) {
        const uint8_t* four = operands[i / kGroups] + line * 4;
        if constexpr (B::kSumsAreWide) {
          partial[i] = B::MulAdd(line == 0 ? B::Set(*initial[i / kGroups]) : partial[i], x[i % kGroups], four);
        } else {
          partial[i] = B::MulAdd(line % kPartialLength == 0 ? B::Start() : partial[i], x[i % kGroups], four);
        }
      }
      if (B::kSumsAreWide ? line + 1 == kLines : (line + 1) % kPartialLength == 0 || line + 1 == kLines) {
#pragma GCC unroll 16
        for (int i = 0; i < kRows * kGroups; ++i) {
          if constexpr (B::kSumsAreWide) {
            sums[i] = partial[i];
          } else {
            sums[i] = line < kPartialLength ? B::Plus(B::Widen(partial[i]), *initial[i / kGroups])
                                            : B::Add(sums[i], partial[i]);
          }
        }
      }
    }
  }
};

// V: a word holds the same bytes of four tokens; even and odd channels are extracted separately. Codes are multiplied
// as levels, unsigned codes (which have offsets) less their midpoint. kScaleSigns: scales may be negative. With wide
// sums the fields are multiplied as they are, with their bits flipped where the scale is negative, and the initial
// values of the sums compensate for it.
template <class Base, bool kScaleSigns>
struct SubbyteValue : Base {
  static constexpr int kSub = 4;
  static constexpr bool kHasScaleSigns = kScaleSigns;
  static constexpr bool kSmallBlocks = Base::kLevelsOfE2M1;  // blocks of 16 channels; other codes have 32 or more
  static constexpr int kMiddle = 1 << (Base::kBits - 1);
  static constexpr int kMaxLevel = Base::kLevelsOfE2M1 ? Base::kLevels.offset : kMiddle;
  static constexpr bool kHasInitialSums = ValueBytes::kSumsAreWide && !Base::kLevelsOfE2M1;

  static constexpr int kChannels = ValueBytes::kChannels;  // channels in a register, 16 or 32
  static constexpr int kVectors = kChannels / 16;
  static constexpr int kUnroll = ValueBytes::kUnroll;  // registers per call where possible
  static constexpr int kManyRows = ValueBytes::kManyRows;

  // Levels of the even (kField 0) or odd (1) channels.
  template <class B, int kField>
  static KVANTA_INLINE typename B::V Levels(typename B::V low, typename B::V high, const uint8_t* signs) {
    if constexpr (Base::kLevelsOfE2M1) {
      return Base::template LookUp<B>(low, kField * Base::kLow, Base::kLevels.level);
    } else {
      if constexpr (kHasInitialSums && kScaleSigns && Base::kHigh == 0) {
        return B::AndFlip(kField == 0 ? low : B::Right(low, kField * Base::kLow), (1 << Base::kLow) - 1, signs);
      }
      const typename B::V fields = Base::template Fields<B>(low, kField * Base::kLow, high, kField * Base::kHigh);
      if constexpr (kHasInitialSums) {
        return kScaleSigns ? B::Flip(fields, signs) : fields;
      } else if constexpr (kScaleSigns) {
        return B::template SignedSub<kMiddle>(fields, signs);
      } else {
        return B::Sub(fields, kMiddle);
      }
    }
  }

  // Channels [column, column + kCount * kChannels). dots[(r * kCount + c) * kVectors + v]: row r with the v-th 16
  // channels of register c. kTail: fewer than kChannels are left. probs[c * kVectors + v]: operands of row 0 for these
  // channels, those of the next row kProbRowBytes<1> after them; all channels of a register share them unless blocks
  // are small. signs[c]: signs of register c's scales. initial[c]: initial values of the sums, where kHasInitialSums,
  // those of the next row kMaxBlocks after them.
  template <int kRows, bool kTail, int kCount>
  static KVANTA_INLINE void DotValues(const uint8_t* words, int head_dim, int column, int count,
                                      const uint8_t* const* probs, const uint8_t* const* signs,
                                      const int32_t* const* initial, Vec16::F* dots, Prefetcher& prefetch) {
    // 64 slots, the most common count, as a compile-time constant.
    if (count == 16 && !kTail) {
      SumValues<kRows, kTail, kCount, 16>(words, head_dim, column, count, probs, signs, initial, dots, prefetch);
    } else {
      SumValues<kRows, kTail, kCount, 0>(words, head_dim, column, count, probs, signs, initial, dots, prefetch);
    }
  }

 private:
  // Sums are of fields, which are not negative, or of levels.
  template <class B, class Probs>
  static KVANTA_INLINE typename B::Accumulator MulAdd(typename B::Accumulator partial, Probs probs, typename B::V x) {
    if constexpr (kHasInitialSums) {
      return B::MulAddFields(partial, probs, x);
    } else {
      return B::MulAddSigned(partial, probs, x);
    }
  }

  template <int kRows, bool kTail, int kCount, int kWords>
  static KVANTA_INLINE void SumValues(const uint8_t* words, int head_dim, int column, int count,
                                      const uint8_t* const* probs, const uint8_t* const* signs,
                                      const int32_t* const* initial, Vec16::F* dots, Prefetcher& prefetch) {
    if constexpr (kWords != 0) count = kWords;
    using B = ValueBytes;
    // Words whose products a partial sum can hold: all of a page with wide sums.
    constexpr int kPartialLength = B::kSumsAreWide
                                       ? kMaxPageTokens
                                       : Base::template PartialLength<B>(kMaxLevel, static_cast<int64_t>(kMaxByteProb));
    const int64_t stride = int64_t{head_dim} * Base::kBits / 2;
    const int64_t high = int64_t{head_dim} * Base::kLow / 2;
    const int group = column / kChannels, left = head_dim - column;
    constexpr int kSums = kCount * kRows;
    typename B::Sum even[kSums], odd[kSums];
    for (int i = 0; i < kSums; ++i) {
      even[i] = odd[i] = B::Set(kHasInitialSums ? initial[i / kRows][i % kRows * kMaxBlocks] : 0);
    }
    for (int begin = 0; begin < count; begin += kPartialLength) {
      typename B::Accumulator partial_even[kSums], partial_odd[kSums];
      for (int i = 0; i < kSums; ++i) {
        partial_even[i] = partial_odd[i] = B::Start();
        if constexpr (B::kSumsAreWide) partial_even[i] = even[i], partial_odd[i] = odd[i];
      }
      const int end = begin + kPartialLength < count ? begin + kPartialLength : count;
      const auto add = [&](int i) __attribute__((always_inline)) {
        const uint8_t* word = words + i * stride;
#pragma GCC unroll 2
        for (int c = 0; c < kCount; ++c) {
          const typename B::V low = B::template LoadSets<Base::kLow, kTail>(word, group + c, left);
          typename B::V top = low;
          if constexpr (Base::kHigh != 0) {
            top = B::template LoadSets<Base::kHigh, kTail>(word + high, group + c, left);
          }
          const typename B::V x = Levels<B, 0>(low, top, signs[c] + i * 4);
          const typename B::V y = Levels<B, 1>(low, top, signs[c] + i * 4);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const int64_t four = r * kProbRowBytes<1> + i * 4;
            const auto w =
                B::template LoadProbs<kSmallBlocks>(probs[c * kVectors] + four, probs[(c + 1) * kVectors - 1] + four);
            partial_even[c * kRows + r] = MulAdd<B>(partial_even[c * kRows + r], w, x);
            partial_odd[c * kRows + r] = MulAdd<B>(partial_odd[c * kRows + r], w, y);
          }
        }
      };
      int i = begin;
      for (; i + 4 <= end; i += 4) {
        prefetch.template Steps<4>();
        add(i);
        add(i + 1);
        add(i + 2);
        add(i + 3);
      }
      for (; i < end; ++i) add(i);
#pragma GCC unroll 16
      for (int j = 0; j < kSums; ++j) {
        if constexpr (B::kSumsAreWide) {
          even[j] = partial_even[j], odd[j] = partial_odd[j];
        } else {
          even[j] = B::Add(even[j], partial_even[j]);
          odd[j] = B::Add(odd[j], partial_odd[j]);
        }
      }
    }
    for (int i = 0; i < kSums; ++i) {
      B::Interleave(even[i], odd[i], dots + (i % kRows * kCount + i / kRows) * kVectors);
    }
  }
};

}  // namespace
}  // namespace kvanta::kernels
