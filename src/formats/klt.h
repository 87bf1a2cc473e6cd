// Keys in the eigen-channels of their calibrated transform, with uneven bits (the Karhunen-Loeve transform of a source
// whose errors the queries weigh; formats/query_transform.h). A row, in blocks of 8 channels that have the bits of the
// head's BitAllocation:
//
//   | codes of blocks of 5 to 7 bits, each with its own level | circular string of the codes of 1 to 4 bits |
//
// as in formats/trellis.h, but that each element of the string has its own width b: its window is the 8 bits from its
// code on, its level that of b bits. Blocks of 0 bits are zero. x_hat = s * level, one s for the row: the transform
// scales each channel to the root mean square of its levels.
#pragma once

#include <cstdint>

#include "formats/bit_allocation.h"
#include "formats/format_traits.h"
#include "formats/trellis.h"

namespace kvanta::formats {

// Finds the codes of the blocks with 1 to 4 bits, of which there are some, by the search that klt_search.h defines:
// targets int16 in its unit, and codes, both [head_dim]. Every instruction set has an implementation with the same
// result.
using KltSearch = void (*)(const BitAllocation& allocation, const int16_t* targets, uint8_t* codes) noexcept;
void PortableKltSearch(const BitAllocation& allocation, const int16_t* targets, uint8_t* codes) noexcept;

// As Format::encode_row and Format::decode_row.
void EncodeKltRow(const BitAllocation& allocation, const float* x, RowSections out, EncodeCounts& counts,
                  KltSearch search) noexcept;
void DecodeKltRow(const BitAllocation& allocation, ConstRowSections in, float* x) noexcept;

// The levels [head_dim] of a row's codes.
void KltLevelsOf(const BlockBits& blocks, const uint8_t* codes, int8_t* levels) noexcept;

template <ElementType kKltCode>
struct KltRow : TrellisTraits<kKltCode> {
  static constexpr std::string_view kRule =
      "codes: nearest levels, and the weighted trellis search below, at the row's root mean square; s = "
      "fp16(sum(w x level) / sum(w level level)); x_hat = s * level";

  static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                        EncodeCounts& counts) noexcept {
    EncodeKltRow(head.allocation != nullptr ? *head.allocation : DefaultAllocation(head_dim, CodeBits(kKltCode)), x,
                 out, counts, PortableKltSearch);
  }
  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters head, float* x) noexcept {
    DecodeKltRow(head.allocation != nullptr ? *head.allocation : DefaultAllocation(head_dim, CodeBits(kKltCode)), in,
                 x);
  }
};

struct Klt3 : KltRow<ElementType::kKlt3> {
  using Values = Trellis3;
  static constexpr std::string_view kName = "klt3";
  static constexpr std::string_view kSummary =
      "K: trellis codes of 3 bits on average over calibrated eigen-channels, fp16 scale per (token, head), with "
      "+query; "
      "V: t3; open and first page exact";
};
struct Klt2 : KltRow<ElementType::kKlt2> {
  using Values = Trellis2;
  static constexpr std::string_view kName = "klt2";
  static constexpr std::string_view kSummary =
      "K: trellis codes of 2 bits on average over calibrated eigen-channels, fp16 scale per (token, head), with "
      "+query; "
      "V: t2; open and first page exact";
};

}  // namespace kvanta::formats
