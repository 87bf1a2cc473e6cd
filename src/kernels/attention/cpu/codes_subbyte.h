// Integer and e2m1 codes of up to 6 bits, once for all ISAs, over the bytes of codes_<isa>.h: fields become bytes in
// registers and meet coefficients of 8 bits; sums are exact in 32 bits. Machines multiply unsigned bytes with signed
// ones: of keys the codes are unsigned, with an offset that a bias takes off again; of values the weights are, which
// are not negative, and the codes have their signs. 8 bits of a query or a weight are finer than what these codes keep
// of a key or a value (SubbyteOperandsAddLittle in the tests holds them to that), and cost half of 16.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

// How a code's fields become bytes: level + offset, from 0 to `largest`, or the level.
struct SubbyteLevels {
  alignas(64) uint8_t byte[64];   // of the first 16 fields, four times
  alignas(64) uint8_t level[64];  // in two's complement
  int offset;
  int largest;
};

constexpr SubbyteLevels SubbyteLevelsOf(formats::ElementType code) {
  const formats::CodeLevels levels = formats::Levels(code);
  const int count = 1 << formats::CodeBits(code);
  SubbyteLevels result{.byte = {}, .level = {}, .offset = 0, .largest = 0};
  for (int field = 0; field < count; ++field) {
    if (-levels.level[field] > result.offset) result.offset = -levels.level[field];
  }
  for (int field = 0; field < count; ++field) {
    const int byte = levels.level[field] + result.offset;
    if (byte > result.largest) result.largest = byte;
    for (int i = field; field < 16 && i < 64; i += 16) {
      result.byte[i] = static_cast<uint8_t>(byte);
      result.level[i] = static_cast<uint8_t>(levels.level[field]);
    }
  }
  return result;
}

// What keys and values of a code share. Codes with the same planes whose bytes are their fields share all of it.
template <int kLowBits, int kHighBits, bool kIsE2M1>
struct SubbyteCode {
  static constexpr bool kInteger = true;
  static constexpr int kOperandBytes = 1;
  static constexpr int kLow = kLowBits, kHigh = kHighBits, kBits = kLow + kHigh;
  static constexpr SubbyteLevels kLevels = SubbyteLevelsOf(formats::ElementType::kE2M1);  // where kLevelsOfE2M1
  static constexpr bool kLevelsOfE2M1 = kIsE2M1;

  // Entries of a table of 16, four times, for the fields of `plane` at bit `shift`.
  template <class B>
  static KVANTA_INLINE typename B::V LookUp(typename B::V section, int shift, const uint8_t* table) {
    return B::LookUp(shift == 0 ? section : B::Right(section, shift), table);
  }
  // Fields of `low` at bit `shift` and of `high` at bit `high_shift`, as bytes.
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

  // Products of bytes up to `x` and `y` in magnitude that a register takes before it is added to the sum: a power of 2.
  template <class B>
  static constexpr int RunOf(int64_t x, int64_t y) {
    int run = 1;
    while (2 * run * 2 * x * y <= B::kLargestSum && run < 1024) run *= 2;
    return run;
  }
};

template <formats::ElementType kElementType>
using SubbyteTypeOf = SubbyteCode<formats::Info(kElementType).low_bits, formats::Info(kElementType).high_bits,
                                  kElementType == formats::ElementType::kE2M1>;

// The coefficients of a query: signed bytes, of every 8 the even ones first, the order in which fields come out.
struct SubbyteQuery {
  static constexpr bool kInteger = true;
  static constexpr int kOperandBytes = 1;
  static constexpr float kLargest = 127;
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { Bytes16::PackEvenFirst(x, out); }
};

// The largest weight of a value: an unsigned byte.
inline constexpr float kLargestScaledProb = 255;

// K: a line holds a unit of 16 tokens; equal fields of its bytes are four channels.
template <class Base>
struct SubbyteKey : Base {
  static constexpr int kNarrowest = Base::kHigh != 0 ? Base::kHigh : Base::kLow;
  static constexpr int kStep = 32 / kNarrowest;  // channels of a unit of the narrowest plane
  static constexpr int kBlock = Base::kLevelsOfE2M1 ? 16 : 32;
  static constexpr int kChannelsOfStep = 8;  // for which a dot makes a step of the prefetcher
  static constexpr int kLargestByte = Base::kLevelsOfE2M1 ? Base::kLevels.largest : (1 << Base::kBits) - 1;

  // Products of channels [0, kChannels), a multiple of kStep, of 16 tokens with `coefficients`. `low`, `high`: the
  // planes from the first channel on; starts[r]: what a sum starts from.
  // sums[r * kGroups + g]: of row r and the g-th group of tokens, whose lines are group_bytes behind those before.
  template <int kGroups, int kRows, int kChannels, class B = Bytes16>
  static KVANTA_INLINE void Dot(const uint8_t* low, const uint8_t* high, int64_t group_bytes,
                                const uint8_t* const* operands, const int32_t* starts, typename B::Sum* sums,
                                Prefetcher& prefetch) {
    constexpr int kRun = Base::template RunOf<B>(kLargestByte, 127);  // lines of bytes
    constexpr int kLines = kChannels / 4;
    constexpr int kLowFields = 8 / Base::kLow, kHighFields = 8 / kNarrowest;
    typename B::Run run[kRows * kGroups];
#pragma GCC unroll 8
    for (int line = 0; line < kLines; ++line) {
      if (line % 2 == 0) prefetch.Step();
      typename B::V x[kGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        const typename B::V unit = B::Load(low + g * group_bytes + line / kLowFields * 64);
        typename B::V top = unit;
        if constexpr (Base::kHigh != 0) top = B::Load(high + g * group_bytes + line / kHighFields * 64);
        const int shift = line % kLowFields * Base::kLow;
        if constexpr (Base::kLevelsOfE2M1) {
          x[g] = Base::template LookUp<B>(unit, shift, Base::kLevels.byte);
        } else {
          x[g] = Base::template Fields<B>(unit, shift, top, line % kHighFields * Base::kHigh);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows * kGroups; ++i) {
        const uint8_t* four = operands[i / kGroups] + line * 4;
        if constexpr (B::kSumsAreWide) {
          run[i] = B::MulAdd(line == 0 ? B::Set(starts[i / kGroups]) : run[i], x[i % kGroups], four);
        } else {
          run[i] = B::MulAdd(line % kRun == 0 ? B::Start() : run[i], x[i % kGroups], four);
        }
      }
      if (B::kSumsAreWide ? line + 1 == kLines : (line + 1) % kRun == 0 || line + 1 == kLines) {
#pragma GCC unroll 8
        for (int i = 0; i < kRows * kGroups; ++i) {
          if constexpr (B::kSumsAreWide) {
            sums[i] = run[i];
          } else {
            sums[i] = line < kRun ? B::Plus(B::Widen(run[i]), starts[i / kGroups]) : B::Add(sums[i], run[i]);
          }
        }
      }
    }
  }
};

// V: a unit holds the same bytes of four tokens; even and odd channels come out apart. Codes are met by their levels;
// those of unsigned codes, which have zeros, less the middle one. kScaleSigns: scales may be negative. Where sums are
// wide, fields are met as they are, with their bits flipped where the scale is negative, and the sums start from what
// is too much then.
template <class Base, bool kScaleSigns>
struct SubbyteValue : Base {
  static constexpr int kSub = 4;
  static constexpr bool kHasScaleSigns = kScaleSigns;
  static constexpr bool kSmallBlocks = Base::kLevelsOfE2M1;  // blocks of 16 channels; others have 32 or more
  static constexpr int kMiddle = 1 << (Base::kBits - 1);
  static constexpr int kLargestLevel = Base::kLevelsOfE2M1 ? Base::kLevels.offset : kMiddle;
  static constexpr bool kStarts = ValueBytes::kSumsAreWide && !Base::kLevelsOfE2M1;

  static constexpr int kChannels = ValueBytes::kChannels;  // of a register, 16 or 32
  static constexpr int kVectors = kChannels / 16;
  static constexpr int kUnroll = ValueBytes::kUnroll;  // registers' channels that a call takes, where there are as many

  // Of the even channels (kField 0) or the odd ones.
  template <class B, int kField>
  static KVANTA_INLINE typename B::V Levels(typename B::V low, typename B::V high, const uint8_t* signs) {
    if constexpr (Base::kLevelsOfE2M1) {
      return Base::template LookUp<B>(low, kField * Base::kLow, Base::kLevels.level);
    } else {
      if constexpr (kStarts && kScaleSigns && Base::kHigh == 0) {
        return B::AndFlip(kField == 0 ? low : B::Right(low, kField * Base::kLow), (1 << Base::kLow) - 1, signs);
      }
      const typename B::V fields = Base::template Fields<B>(low, kField * Base::kLow, high, kField * Base::kHigh);
      if constexpr (kStarts) {
        return kScaleSigns ? B::Flip(fields, signs) : fields;
      } else if constexpr (kScaleSigns) {
        return B::template SignedSub<kMiddle>(fields, signs);
      } else {
        return B::Sub(fields, kMiddle);
      }
    }
  }

  // Channels [column, column + kCount * kChannels). dots[(r * kCount + c) * kVectors + v]: row r on the v-th 16
  // channels of register c. kTail: fewer than kChannels are left. weights[c * kVectors + v][r]: of the row, for these
  // channels, which share them with the register's others unless blocks are small; signs[c]: of the register's;
  // starts[c][r]: what the row's sums start from, where kStarts.
  template <int kRows, bool kTail, int kCount>
  static KVANTA_INLINE void DotValues(const uint8_t* units, int head_dim, int column, int count,
                                      const uint8_t* const (*probs)[kRows], const uint8_t* const* signs,
                                      const int32_t (*starts)[kRows], Vec16::F* dots, Prefetcher& prefetch) {
    // 64 slots, the most common count, as one that the compiler knows.
    if (count == 16 && !kTail) {
      SumValues<kRows, kTail, kCount, 16>(units, head_dim, column, count, probs, signs, starts, dots, prefetch);
    } else {
      SumValues<kRows, kTail, kCount, 0>(units, head_dim, column, count, probs, signs, starts, dots, prefetch);
    }
  }

 private:
  template <int kRows, bool kTail, int kCount, int kUnits>
  static KVANTA_INLINE void SumValues(const uint8_t* units, int head_dim, int column, int count,
                                      const uint8_t* const (*probs)[kRows], const uint8_t* const* signs,
                                      const int32_t (*starts)[kRows], Vec16::F* dots, Prefetcher& prefetch) {
    if constexpr (kUnits != 0) count = kUnits;
    using B = ValueBytes;
    // Units whose products a register takes before they are added to the sum: all of a page where sums are wide.
    constexpr int kRun = B::kSumsAreWide
                             ? kMaxPageTokens
                             : Base::template RunOf<B>(kLargestLevel, static_cast<int64_t>(kLargestScaledProb));
    const int64_t stride = int64_t{head_dim} * Base::kBits / 2;
    const int64_t high = int64_t{head_dim} * Base::kLow / 2;
    const int group = column / kChannels, left = head_dim - column;
    constexpr int kSums = kCount * kRows;
    typename B::Sum even[kSums], odd[kSums];
    for (int i = 0; i < kSums; ++i) even[i] = odd[i] = B::Set(kStarts ? starts[i / kRows][i % kRows] : 0);
    for (int begin = 0; begin < count; begin += kRun) {
      typename B::Run run_even[kSums], run_odd[kSums];
      for (int i = 0; i < kSums; ++i) {
        run_even[i] = run_odd[i] = B::Start();
        if constexpr (B::kSumsAreWide) run_even[i] = even[i], run_odd[i] = odd[i];
      }
      const int end = begin + kRun < count ? begin + kRun : count;
#pragma GCC unroll 4
      for (int i = begin; i < end; ++i) {
        const uint8_t* unit = units + i * stride;
        prefetch.Step();
#pragma GCC unroll 2
        for (int c = 0; c < kCount; ++c) {
          const typename B::V low = B::template LoadSets<Base::kLow, kTail>(unit, group + c, left);
          typename B::V top = low;
          if constexpr (Base::kHigh != 0) {
            top = B::template LoadSets<Base::kHigh, kTail>(unit + high, group + c, left);
          }
          const typename B::V x = Levels<B, 0>(low, top, signs[c] + i * 4);
          const typename B::V y = Levels<B, 1>(low, top, signs[c] + i * 4);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const auto w = B::template LoadProbs<kSmallBlocks>(probs[c * kVectors][r] + i * 4,
                                                               probs[(c + 1) * kVectors - 1][r] + i * 4);
            run_even[c * kRows + r] = B::MulAddSigned(run_even[c * kRows + r], w, x);
            run_odd[c * kRows + r] = B::MulAddSigned(run_odd[c * kRows + r], w, y);
          }
        }
      }
      for (int i = 0; i < kSums; ++i) {
        if constexpr (B::kSumsAreWide) {
          even[i] = run_even[i], odd[i] = run_odd[i];
        } else {
          even[i] = B::Add(even[i], run_even[i]);
          odd[i] = B::Add(odd[i], run_odd[i]);
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
