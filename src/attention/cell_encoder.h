// Encoding of rows, and of a cell from another one of the same rows: of a page that closes, or ages.
#pragma once

#include <cstdint>

#include "attention/backend.h"
#include "formats/cell_layout.h"
#include "formats/klt_group.h"
#include "formats/trellis.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

// Kernels of rows before they are written: an instruction set's, which give the same bits as these.
struct RowKernels {
  formats::TrellisSearch search_trellis = formats::PortableTrellisSearch;
  formats::KltSearch search_klt = formats::PortableKltSearch;
  formats::MultiplyRowFn multiply = formats::MultiplyRow;
};

// format.encode_row, where a search takes most of the time by the given one.
void EncodeRow(const formats::Format& format, const float* x, int head_dim, formats::HeadParameters head,
               const RowKernels& kernels, const formats::RowSections& out, SideCounts& counts) noexcept;

// Counts the zero scales of an encoded row.
void CountZeroScales(const formats::Format& format, int head_dim, const formats::RowSections& row,
                     SideCounts& counts) noexcept;

// Encoding of a cell.
struct CellFormat {
  const formats::Format* format;
  formats::CellSections sections;
  formats::HeadParameters head;
};

// Decodes a cell and encodes its rows in another format. Both lie in the cache's layout.
class CellEncoder {
 public:
  CellEncoder(formats::SideKind kind, formats::CellShape shape, const CellFormat& from, const CellFormat& to,
              const RowKernels& kernels, SideCounts& counts) noexcept
      : kind_(kind), shape_(shape), from_(from), to_(to), kernels_(kernels), counts_(counts) {}

  void Encode(const uint8_t* from, uint8_t* to) noexcept;

 private:
  void DecodeRows(const uint8_t* cell, int slot, int tokens) noexcept;
  void EncodeTokenGroup(int slot, uint8_t* cell) noexcept;

  static constexpr int kMaxTokenGroup = 64;

  formats::SideKind kind_;
  formats::CellShape shape_;
  const CellFormat from_;
  const CellFormat to_;
  const RowKernels& kernels_;
  SideCounts& counts_;
  formats::RowBuffer buffer_;
  alignas(64) float x_[kMaxTokenGroup * kernels::kMaxHeadDim];
  uint8_t codes_[kMaxTokenGroup * kernels::kMaxHeadDim];
  uint8_t token_scales_[kMaxTokenGroup * 4];
};

}  // namespace kvanta::attention
