// Write-time layout of a cell in the cache: a bijection on the bytes of each section, chosen so that
// a kernel's load is one contiguous vector. It depends on the code's width only, never on the ISA.
//
// K codes: 4-byte units of a row (1 channel at 32 bits, 2 at 16, 4 at 8, 8 at 4, ...), transposed within groups of 16
// tokens, so a 64-byte line holds the same channels of 16 tokens:
//     canonical [t][u]  ->  [t / 16][u][t % 16]            (u = byte / 4)
// V codes: elements of e bytes (e = 4, 2, 1; below 8 bits a byte with several channels), interleaved over 4/e tokens,
// so a 4-byte unit holds the same channel(s) of 4/e consecutive tokens:
//     canonical [t][j]  ->  [t / (4/e)][j][t % (4/e)]      (j = element in the row)
// Block scales and offsets (both sides): canonical [t][b] -> [b][t].   Token and channel sections: unchanged.
#pragma once

#include <cstdint>

#include "formats/cell.h"

namespace kvanta::formats {

enum class SideKind : uint8_t { kK, kV };

// Byte offset within the codes, in the cache's layout, of canonical byte `byte` of token `token`.
int64_t CodeOffset(SideKind kind, const Format& format, CellShape shape, int token, int64_t byte) noexcept;

// Writes one token's row (canonical sections of a single token) into a cell in cache layout / reads it back.
void StoreRow(SideKind kind, const Format& format, CellShape shape, const CellSections& sections, int token,
              ConstRowSections row, uint8_t* cell) noexcept;
void LoadRow(SideKind kind, const Format& format, CellShape shape, const CellSections& sections, int token,
             const uint8_t* cell, RowSections row) noexcept;

// Copies a token's row of a K cell in cache layout to another cell of the same format and shape.
void CopyKeyRow(const Format& format, CellShape shape, const CellSections& sections, int from_token,
                const uint8_t* from_cell, int to_token, uint8_t* to_cell) noexcept;

// Whole-cell bijections: cache layout <-> canonical bytes, both sections.bytes long.
void ToCanonical(SideKind kind, const Format& format, CellShape shape, const CellSections& sections,
                 const uint8_t* cell, uint8_t* canonical) noexcept;
void FromCanonical(SideKind kind, const Format& format, CellShape shape, const CellSections& sections,
                   const uint8_t* canonical, uint8_t* cell) noexcept;

}  // namespace kvanta::formats
