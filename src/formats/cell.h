// A cell: one side of one KV head in one page, as bytes. Canonical order of the planes, each 16-byte aligned:
//
//   codes [tokens][row_bytes] | block scales [tokens][blocks] | token scales [tokens]
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
struct CellPlanes {
  int64_t codes = 0;
  int64_t block_scales = 0;
  int64_t token_scales = 0;
  int64_t bytes = 0;      // whole cell, a multiple of 16
  int64_t row_bytes = 0;  // codes of one token
  int blocks = 0;         // block scales of one token
};

// Throws InputError where the format cannot take the shape (block does not divide head_dim, head_dim not a multiple of
// 8 in range, tokens not 16, 32, 64 or 128), naming the value and the alternatives.
CellPlanes PlanCell(const Format& format, CellShape shape);

// The same for any number of tokens from 1: rows outside a page.
CellPlanes PlanRows(const Format& format, CellShape shape);

// The planes of one token's row inside a canonical cell.
inline RowPlanes CanonicalRow(const Format& format, const CellPlanes& planes, int token, uint8_t* cell) noexcept {
  return {cell + planes.codes + token * planes.row_bytes,
          cell + planes.block_scales + int64_t{token} * planes.blocks * format.block_scale_bytes,
          cell + planes.token_scales + int64_t{token} * format.token_scale_bytes};
}
inline ConstRowPlanes CanonicalRow(const Format& format, const CellPlanes& planes, int token,
                                   const uint8_t* cell) noexcept {
  return {cell + planes.codes + token * planes.row_bytes,
          cell + planes.block_scales + int64_t{token} * planes.blocks * format.block_scale_bytes,
          cell + planes.token_scales + int64_t{token} * format.token_scale_bytes};
}

}  // namespace kvanta::formats
