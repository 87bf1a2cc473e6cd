#include "attention/cell_encoder.h"

#include <algorithm>
#include <cstring>

#include "formats/klt.h"
#include "formats/trellis.h"

namespace kvanta::attention {

// Counts the zero scales of an encoded row.
void CountZeroScales(const formats::Format& format, int head_dim, const formats::RowSections& row,
                     SideCounts& counts) noexcept {
  const formats::Scaling& scaling = format.scaling;
  const auto count = [&](formats::ScaleType type, const uint8_t* scales, int blocks) {
    if (type == formats::ScaleType::kE8M0) return;  // cannot represent zero
    const auto bytes = static_cast<size_t>(formats::Bytes(type));
    for (int block = 0; block < blocks; ++block) {
      const uint8_t* scale = scales + static_cast<size_t>(block) * bytes;
      counts.zero_blocks += std::all_of(scale, scale + bytes, [](uint8_t byte) { return byte == 0; }) ? 1 : 0;
    }
    counts.blocks += blocks;
  };
  // With an offset, a block of equal values has scale 0 without loss: not counted.
  if (scaling.block != formats::ScaleType::kNone && !scaling.block_offset) {
    count(scaling.block, row.block_scales, head_dim / formats::BlockChannels(scaling, head_dim));
  } else if (scaling.block == formats::ScaleType::kNone && scaling.token != formats::ScaleType::kNone &&
             !scaling.token_offset) {
    count(scaling.token, row.token_scales, 1);
  }
}

// format.encode_row, where a search takes most of the time by the given one.
void EncodeRow(const formats::Format& format, const float* x, int head_dim, formats::HeadParameters head,
               const RowKernels& kernels, const formats::RowSections& out, SideCounts& counts) noexcept {
  if (formats::IsTrellis(format.code)) {
    return formats::EncodeTrellisRow(format.code_bits, x, head_dim, head, out, counts, kernels.search_trellis);
  }
  if (formats::IsAllocated(format.code) && head.allocation != nullptr) {
    return formats::EncodeKltRow(*head.allocation, x, out, counts, kernels.search_klt);
  }
  format.encode_row(x, head_dim, head, out, counts);
}

void CellEncoder::Encode(const uint8_t* from, uint8_t* to) noexcept {
  const formats::Format& format = *to_.format;
  const int step = std::max({1, from_.format->scaling.token_group, format.scaling.token_group});
  for (int slot = 0; slot < shape_.tokens; slot += step) {
    DecodeRows(from, slot, step);
    if (format.encode_token_group != nullptr) {
      EncodeTokenGroup(slot, to);
      continue;
    }
    for (int row = 0; row < step; ++row) {
      const formats::RowSections sections = buffer_.Sections();
      EncodeRow(format, x_ + row * shape_.head_dim, shape_.head_dim, to_.head, kernels_, sections, counts_);
      CountZeroScales(format, shape_.head_dim, sections, counts_);
      formats::StoreRow(kind_, format, shape_, to_.sections, slot + row, sections, to);
    }
  }
}

void CellEncoder::DecodeRows(const uint8_t* cell, int slot, int tokens) noexcept {
  const formats::Format& format = *from_.format;
  for (int row = 0; row < tokens; ++row) {
    formats::LoadRow(kind_, format, shape_, from_.sections, slot + row, cell, buffer_.Sections());
    if (format.decode_token_group == nullptr) {
      format.decode_row(buffer_.Sections(), shape_.head_dim, from_.head, x_ + row * shape_.head_dim);
    } else {
      const auto copy = [row](uint8_t* to, const uint8_t* section, int64_t bytes) {
        std::memcpy(to + row * bytes, section, static_cast<size_t>(bytes));
      };
      copy(codes_, buffer_.Sections().codes, from_.sections.row_bytes);
      copy(token_scales_, buffer_.Sections().token_scales, formats::Bytes(format.scaling.token));
    }
  }
  if (format.decode_token_group == nullptr) return;
  formats::ConstGroupSections group =
      formats::CanonicalTokenGroup(format, from_.sections, shape_.head_dim, slot / format.scaling.token_group, cell);
  group.codes = codes_;  // channel sections are the same in every layout
  group.token_scales = token_scales_;
  format.decode_token_group(group, shape_.head_dim, x_);
}

void CellEncoder::EncodeTokenGroup(int slot, uint8_t* cell) noexcept {
  const formats::Format& format = *to_.format;
  formats::GroupSections group =
      formats::CanonicalTokenGroup(format, to_.sections, shape_.head_dim, slot / format.scaling.token_group, cell);
  group.codes = codes_;  // channel sections are the same in every layout
  group.token_scales = token_scales_;
  if (formats::IsAllocated(format.code)) {
    formats::EncodeKltGroup(format.code_bits, x_, shape_.head_dim, to_.head, group, counts_, kernels_.search_klt);
  } else {
    format.encode_token_group(x_, shape_.head_dim, to_.head, group, counts_);
  }
  for (int row = 0; row < format.scaling.token_group; ++row) {
    formats::StoreRow(kind_, format, shape_, to_.sections, slot + row,
                      {.codes = codes_ + row * to_.sections.row_bytes,
                       .token_scales = token_scales_ + row * formats::Bytes(format.scaling.token)},
                      cell);
  }
}

}  // namespace kvanta::attention
