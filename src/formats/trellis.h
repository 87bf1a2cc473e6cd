// t4, t3, t2: trellis-coded quantization. A row's codes, b bits each, are one circular string of bits, code 0 first and
// low bits first. The level of element j is levels[w], w the 8 bits from code j on (the first of them the lowest):
//
//   bits   0  b  2b 3b ...                 w(j) = bits [b j, b j + 8) of the string, circular
//          |c0|c1|c2|c3| ... |c(d-1)|c0|   x_hat = s * levels[w(j)]
//
// so 256 levels serve b bits, and neighbours share 8 - b of theirs. A search over the trellis of windows (Viterbi)
// finds the string that is nearest to the row; the string is circular so that no element has a fixed window
// (tail-biting). ADR 0043.
#pragma once

#include <cstdint>

#include "formats/format_traits.h"

namespace kvanta::formats {

// Levels of 2, 3 and 4 bits per element, by window, for rows with a root mean square of about 42: int8, trained by
// tools/train_trellis.py (trellis_levels.h).
const int8_t* TrellisLevels(int bits) noexcept;

// Finds the codes [head_dim] whose levels are nearest to targets / kTrellisUnit, by the search that trellis_search.h
// defines. Every instruction set has an implementation with the same result.
using TrellisSearch = void (*)(int bits, const int16_t* targets, int head_dim, uint8_t* codes) noexcept;
void PortableTrellisSearch(int bits, const int16_t* targets, int head_dim, uint8_t* codes) noexcept;

// As Format::encode_row and Format::decode_row, with codes of `bits` bits.
void EncodeTrellisRow(int bits, const float* x, int head_dim, HeadParameters head, RowSections out,
                      EncodeCounts& counts, TrellisSearch search) noexcept;
void DecodeTrellisRow(int bits, ConstRowSections in, int head_dim, float* x) noexcept;

// Formats of trellis codes, trellis.h's and klt.h's.
template <ElementType kTrellisCode>
struct TrellisTraits : FormatTraits {
  static constexpr ElementType kElementType = kTrellisCode;
  static constexpr Scaling kScaling = {.token = ScaleType::kFp16};
  static constexpr bool kHadamard = true;
  static constexpr ExactPages kExact = ExactPages::kOpen;
  static constexpr int kSinkPages = 1;
};

template <ElementType kTrellisCode>
struct TrellisRow : TrellisTraits<kTrellisCode> {
  static constexpr std::string_view kRule =
      "codes: the trellis search below at the row's root mean square; s = fp16(sum(x level) / sum(level level)); x_hat "
      "= s * level";

  static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                        EncodeCounts& counts) noexcept {
    EncodeTrellisRow(CodeBits(kTrellisCode), x, head_dim, head, out, counts, PortableTrellisSearch);
  }
  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters /*head*/, float* x) noexcept {
    DecodeTrellisRow(CodeBits(kTrellisCode), in, head_dim, x);
  }
};

struct Trellis4 : TrellisRow<ElementType::kTrellis4> {
  static constexpr std::string_view kName = "t4";
  static constexpr std::string_view kSummary =
      "4-bit trellis-coded quantization, fp16 scale per (token, head), hadamard, open and first page exact";
};
struct Trellis3 : TrellisRow<ElementType::kTrellis3> {
  static constexpr std::string_view kName = "t3";
  static constexpr std::string_view kSummary =
      "3-bit trellis-coded quantization, fp16 scale per (token, head), hadamard, open and first page exact";
};
struct Trellis2 : TrellisRow<ElementType::kTrellis2> {
  static constexpr std::string_view kName = "t2";
  static constexpr std::string_view kSummary =
      "2-bit trellis-coded quantization, fp16 scale per (token, head), hadamard, open and first page exact";
};

}  // namespace kvanta::formats
