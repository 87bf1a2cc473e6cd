// A cell: one side of one KV head in one page, as bytes. Canonical order of its sections, each 16-byte aligned; a
// section that the format lacks has no bytes:
//
//   codes [tokens][row_bytes] | block scales [tokens][blocks] | block offsets [tokens][blocks]
//   | token scales [tokens] | token offsets [tokens]
//   | channel scales [token groups][head_dim] | channel offsets [token groups][head_dim]
//
// With Scaling::channel_bits a group's channel scales are those of formats/klt_group.h, and there are no offsets.
//
// Inside the cache a backend may permute bytes within a section (src/formats/cell_layout.h); sizes stay the same.
#pragma once

#include <cstdint>
#include <string>

#include "formats/format.h"

namespace kvanta::formats {

struct CellShape {
  int tokens;    // page size P
  int head_dim;  // D

  bool operator==(const CellShape&) const = default;
};

inline constexpr int kMinHeadDim = 8;
inline constexpr int kMaxHeadDim = 1024;

// Byte offsets of the sections of a cell, and its size. Sections that a format lacks have size 0.
struct CellSections {
  int64_t codes = 0;
  int64_t block_scales = 0;
  int64_t block_offsets = 0;
  int64_t token_scales = 0;
  int64_t token_offsets = 0;
  int64_t channel_scales = 0;
  int64_t channel_offsets = 0;
  int64_t bytes = 0;      // whole cell, a multiple of 16
  int64_t row_bytes = 0;  // codes of one token
  int blocks = 0;         // block scales of one token
};

// Calls visit(offset in CellSections, pointer in Sections, elements of a row, bytes of an element) for every section of
// scales and offsets that a row of `format` has. Sections: RowSections or ConstRowSections.
template <class Sections, class Visit>
constexpr void ForEachRowSection(const Format& format, int blocks, Visit visit) {
  constexpr int kOffsetBytes = 2;
  const Scaling& scaling = format.scaling;
  if (scaling.block != ScaleType::kNone) {
    visit(&CellSections::block_scales, &Sections::block_scales, blocks, Bytes(scaling.block));
  }
  if (scaling.block_offset) visit(&CellSections::block_offsets, &Sections::block_offsets, blocks, kOffsetBytes);
  if (scaling.token != ScaleType::kNone) {
    visit(&CellSections::token_scales, &Sections::token_scales, 1, Bytes(scaling.token));
  }
  if (scaling.token_offset) visit(&CellSections::token_offsets, &Sections::token_offsets, 1, kOffsetBytes);
}

// Shape of the cells of `shape`'s rows: head_dim rounded up to whole blocks of scales and whole units of codes. A row's
// channels beyond its head_dim are padding (ADR 0086). Throws InputError if head_dim is not a multiple of 8 in range.
CellShape PaddedShape(const Format& format, CellShape shape);

// "int4 has blocks of 32 channels, which do not divide head_dim 80 (80 % 32 = 16); formats that take it: ..."; empty if
// rows of the format have no padding.
std::string DescribePadding(const Format& format, int head_dim);

// Lays out a cell of a page. Throws InputError with the value and the alternatives if the format does not support the
// shape: it would have padding (PaddedShape has none), the token group does not divide the page, head_dim is not a
// multiple of 8 in range, or tokens is not 16, 32, 64 or 128.
CellSections PlanCell(const Format& format, CellShape shape);

// The same for rows outside a page: any number of tokens from 1, in whole token groups.
CellSections PlanRows(const Format& format, CellShape shape);

// Layout of a cell without scales: any even number of channels of 16 or 32 bits, in a page.
constexpr CellSections UnquantizedSections(int code_bits, CellShape shape) {
  CellSections sections;
  sections.row_bytes = int64_t{shape.head_dim} * code_bits / 8;
  sections.bytes = sections.row_bytes * shape.tokens;
  sections.channel_scales = sections.channel_offsets = sections.bytes;  // no bytes
  return sections;
}
constexpr CellSections Bf16Sections(CellShape shape) {
  return UnquantizedSections(16, shape);
}

// Sections of one token's row in a canonical cell.
RowSections CanonicalRow(const Format& format, const CellSections& sections, int token, uint8_t* cell) noexcept;
ConstRowSections CanonicalRow(const Format& format, const CellSections& sections, int token,
                              const uint8_t* cell) noexcept;

// Sections of one token group in a canonical cell. Channel sections are the same in every layout.
GroupSections CanonicalTokenGroup(const Format& format, const CellSections& sections, int head_dim, int group,
                                  uint8_t* cell) noexcept;
ConstGroupSections CanonicalTokenGroup(const Format& format, const CellSections& sections, int head_dim, int group,
                                       const uint8_t* cell) noexcept;

// Memory for the sections of one row in any format.
class RowBuffer {
 public:
  RowSections Sections() noexcept { return {codes_, block_scales_, block_offsets_, token_scales_, token_offsets_}; }

 private:
  alignas(64) uint8_t codes_[kMaxHeadDim * 4];
  uint8_t block_scales_[kMaxHeadDim];
  uint8_t block_offsets_[kMaxHeadDim];
  uint8_t token_scales_[16];
  uint8_t token_offsets_[16];
};

}  // namespace kvanta::formats
