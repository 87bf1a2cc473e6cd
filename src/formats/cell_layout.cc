#include "formats/cell_layout.h"

#include <cstring>

#include "formats/bytes.h"

namespace kvanta::formats {
namespace {

constexpr int kKeyUnit = 4;     // bytes of a row that stay together in K codes
constexpr int kKeyTokens = 16;  // tokens in one line of K codes
constexpr int kValueUnit = 4;   // bytes of V codes that hold the same element of consecutive tokens

// Bytes of a V element: 4-bit codes move as bytes of two channels.
int ElementBytes(const Format& format) noexcept {
  return format.code_bits < 8 ? 1 : format.code_bits / 8;
}

// Calls copy(offset in the cell, offset in the row, bytes) for each run of code bytes that stay together.
template <class Copy>
void ForEachCodeRun(SideKind kind, const Format& format, int64_t row_bytes, int token, Copy copy) noexcept {
  if (kind == SideKind::kK) {
    const int64_t base = token / kKeyTokens * (kKeyTokens * row_bytes) + token % kKeyTokens * kKeyUnit;
    for (int64_t unit = 0, units = row_bytes / kKeyUnit; unit < units; ++unit) {
      copy(base + unit * (kKeyTokens * kKeyUnit), unit * kKeyUnit, std::integral_constant<int, kKeyUnit>{});
    }
    return;
  }
  const auto elements = [&](auto bytes) {
    const int tokens = kValueUnit / bytes;
    const int64_t base = token / tokens * (tokens * row_bytes) + token % tokens * bytes;
    for (int64_t i = 0; i < row_bytes / bytes; ++i) copy(base + i * kValueUnit, i * bytes, bytes);
  };
  switch (ElementBytes(format)) {
    case 1:
      return elements(std::integral_constant<int, 1>{});
    case 2:
      return elements(std::integral_constant<int, 2>{});
    default:
      return elements(std::integral_constant<int, 4>{});
  }
}

// Copies a scale or offset of 1, 2 or 4 bytes.
void CopyScale(uint8_t* to, const uint8_t* from, size_t bytes) noexcept {
  if (bytes == 4) {
    std::memcpy(to, from, 4);
  } else if (bytes == 2) {
    std::memcpy(to, from, 2);
  } else {
    *to = *from;
  }
}

// Calls copy(offset in the cell, section of the row, offset in it, bytes) for every scale and offset of a token.
template <class Sections, class Copy>
void ForEachScale(const Format& format, CellShape shape, const CellSections& sections, int token, Copy copy) noexcept {
  ForEachRowSection<Sections>(format, sections.blocks, [&](auto offset, auto section, int elements, int bytes) {
    for (int element = 0; element < elements; ++element) {
      copy(sections.*offset + (int64_t{element} * shape.tokens + token) * bytes, section, element * bytes,
           static_cast<size_t>(bytes));
    }
  });
}

}  // namespace

int64_t CodeOffset(SideKind kind, const Format& format, CellShape shape, int token, int64_t byte) noexcept {
  const int64_t row_bytes = int64_t{shape.head_dim} * format.code_bits / 8;
  const int unit = kind == SideKind::kK ? kKeyUnit : ElementBytes(format);
  const int64_t tokens = kind == SideKind::kK ? kKeyTokens : kValueUnit / unit;
  return token / tokens * (tokens * row_bytes) + byte / unit * (tokens * unit) + token % tokens * unit + byte % unit;
}

void StoreRow(SideKind kind, const Format& format, CellShape shape, const CellSections& sections, int token,
              ConstRowSections row, uint8_t* cell) noexcept {
  // Captured by value: a pointer that is read again after each byte stored takes most of the time.
  ForEachCodeRun(kind, format, sections.row_bytes, token,
                 [first = cell + sections.codes, codes = row.codes](int64_t to, int64_t from, auto bytes) {
                   std::memcpy(first + to, codes + from, bytes);
                 });
  ForEachScale<ConstRowSections>(format, shape, sections, token, [&](int64_t to, auto section, int from, size_t bytes) {
    CopyScale(cell + to, row.*section + from, bytes);
  });
}

void LoadRow(SideKind kind, const Format& format, CellShape shape, const CellSections& sections, int token,
             const uint8_t* cell, RowSections row) noexcept {
  ForEachCodeRun(kind, format, sections.row_bytes, token,
                 [first = cell + sections.codes, codes = row.codes](int64_t from, int64_t to, auto bytes) {
                   std::memcpy(codes + to, first + from, bytes);
                 });
  ForEachScale<RowSections>(format, shape, sections, token, [&](int64_t from, auto section, int to, size_t bytes) {
    CopyScale(row.*section + to, cell + from, bytes);
  });
}

void CopyKeyRow(const Format& format, CellShape shape, const CellSections& sections, int from_token,
                const uint8_t* from_cell, int to_token, uint8_t* to_cell) noexcept {
  const auto first_unit = [&](int token) {
    return sections.codes + token / kKeyTokens * (kKeyTokens * sections.row_bytes) + token % kKeyTokens * kKeyUnit;
  };
  const uint8_t* from = from_cell + first_unit(from_token);
  uint8_t* to = to_cell + first_unit(to_token);
  for (int64_t unit = 0, units = sections.row_bytes / kKeyUnit; unit < units; ++unit) {
    std::memcpy(to + unit * (kKeyTokens * kKeyUnit), from + unit * (kKeyTokens * kKeyUnit), kKeyUnit);
  }
  ForEachRowSection<RowSections>(format, sections.blocks, [&](auto offset, auto /*section*/, int elements, int bytes) {
    for (int element = 0; element < elements; ++element) {
      const auto at = [&](int token) { return sections.*offset + (int64_t{element} * shape.tokens + token) * bytes; };
      CopyScale(to_cell + at(to_token), from_cell + at(from_token), static_cast<size_t>(bytes));
    }
  });
}

void ToCanonical(SideKind kind, const Format& format, CellShape shape, const CellSections& sections,
                 const uint8_t* cell, uint8_t* canonical) noexcept {
  for (int token = 0; token < shape.tokens; ++token) {
    LoadRow(kind, format, shape, sections, token, cell, CanonicalRow(format, sections, token, canonical));
  }
  std::memcpy(canonical + sections.channel_scales, cell + sections.channel_scales,
              static_cast<size_t>(sections.bytes - sections.channel_scales));
}

void FromCanonical(SideKind kind, const Format& format, CellShape shape, const CellSections& sections,
                   const uint8_t* canonical, uint8_t* cell) noexcept {
  for (int token = 0; token < shape.tokens; ++token) {
    StoreRow(kind, format, shape, sections, token, CanonicalRow(format, sections, token, canonical), cell);
  }
  std::memcpy(cell + sections.channel_scales, canonical + sections.channel_scales,
              static_cast<size_t>(sections.bytes - sections.channel_scales));
}

}  // namespace kvanta::formats
