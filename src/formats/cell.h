// A cell: one side of one KV head in one page, as bytes. Canonical order of the planes, each 16-byte aligned; those
// that a format lacks have no bytes:
//
//   codes [tokens][row_bytes] | block scales [tokens][blocks] | block zeros [tokens][blocks]
//   | token scales [tokens] | token zeros [tokens] | channel scales [tiles][head_dim] | channel zeros [tiles][head_dim]
//
// Inside the cache a backend may permute bytes within a plane (src/formats/cell_layout.h); sizes stay the same.
#pragma once

#include <cstdint>

#include "formats/format.h"

namespace kvanta::formats {

struct CellShape {
  int tokens;    // page size P
  int head_dim;  // D

  bool operator==(const CellShape&) const = default;
};

inline constexpr int kMinHeadDim = 8;
inline constexpr int kMaxHeadDim = 1024;

// Byte offsets of the planes inside a cell, and its size. Planes that a format lacks have size 0.
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

// Calls visit(offset in CellSections, pointer in Planes, elements of a row, bytes of an element) for every plane of
// scales and zeros that a row of `format` has. Planes: RowSections or ConstRowSections.
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

// Throws InputError where the format cannot take the shape (block or code do not divide head_dim, tile does not divide
// the page, head_dim not a multiple of 8 in range, tokens not 16, 32, 64 or 128), naming the value and the
// alternatives.
CellSections PlanCell(const Format& format, CellShape shape);

// The same for any number of tokens from 1 (of tiles: whole tiles): rows outside a page.
CellSections PlanRows(const Format& format, CellShape shape);

// A cell without scales, of any even number of channels of 16 or 32 bits, in a page.
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

// The planes of one token's row inside a canonical cell.
RowSections CanonicalRow(const Format& format, const CellSections& sections, int token, uint8_t* cell) noexcept;
ConstRowSections CanonicalRow(const Format& format, const CellSections& sections, int token,
                              const uint8_t* cell) noexcept;

// The planes of one tile inside a canonical cell. The channel planes lie so in every layout.
GroupSections CanonicalTile(const Format& format, const CellSections& sections, int head_dim, int tile,
                            uint8_t* cell) noexcept;
ConstGroupSections CanonicalTile(const Format& format, const CellSections& sections, int head_dim, int tile,
                                 const uint8_t* cell) noexcept;

// Room for the planes of one row of any format.
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
