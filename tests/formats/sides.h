// Shared by the tests of formats: every side of every name, and rows through a format's own sections.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "formats/cell.h"
#include "formats/cell_layout.h"
#include "kvanta/error.h"
#include "kvanta/kv_scheme.h"

namespace kvanta::formats {

struct NamedSide {
  const Format* format;
  SideKind kind;
  std::string text;  // for messages
};

inline std::vector<NamedSide> EverySide() {
  std::vector<NamedSide> sides;
  for (const Format& format : All()) {
    sides.push_back({&format, SideKind::kK, "K of " + std::string(format.name)});
    sides.push_back({&OnSide(format, false), SideKind::kV, "V of " + std::string(format.name)});
  }
  return sides;
}

// True if the format supports cells of this shape.
inline bool Takes(const Format& format, CellShape shape) {
  try {
    PlanCell(format, shape);
  } catch (const InputError&) {
    return false;
  }
  return true;
}

// Encoded and decoded rows: one, or those of a token group.
struct Row {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> block_scales;
  std::vector<uint8_t> block_offsets;
  std::vector<uint8_t> token_scales;
  std::vector<uint8_t> token_offsets;
  std::vector<uint8_t> channel_scales;
  std::vector<uint8_t> channel_offsets;
  EncodeCounts counts;
  std::vector<float> decoded;
};

inline Row EncodeRow(const Format& format, const std::vector<float>& x, float static_scale = 1.0F) {
  const int rows = std::max(1, format.scaling.token_group);
  const int head_dim = static_cast<int>(x.size()) / rows;
  const CellSections plan = PlanRows(format, {rows, head_dim});
  Row row;
  row.codes.resize(static_cast<size_t>(rows * plan.row_bytes));
  row.decoded.resize(x.size());
  if (format.scaling.token_group != 0) {
    row.token_scales.resize(static_cast<size_t>(rows * Bytes(format.scaling.token)));
    row.channel_scales.resize(static_cast<size_t>(GroupScaleBytes(format.scaling, head_dim)));
    row.channel_offsets.resize(static_cast<size_t>(GroupOffsetBytes(format.scaling, head_dim)));
    const GroupSections sections{row.codes.data(), row.token_scales.data(), row.channel_scales.data(),
                                 row.channel_offsets.data()};
    format.encode_token_group(x.data(), head_dim, static_scale, sections, row.counts);
    format.decode_token_group(sections, head_dim, row.decoded.data());
    return row;
  }
  row.block_scales.resize(static_cast<size_t>(plan.blocks * Bytes(format.scaling.block)));
  row.block_offsets.resize(format.scaling.block_offset ? static_cast<size_t>(plan.blocks) * 2 : 0);
  row.token_scales.resize(static_cast<size_t>(Bytes(format.scaling.token)));
  row.token_offsets.resize(format.scaling.token_offset ? 2 : 0);
  const RowSections sections{row.codes.data(), row.block_scales.data(), row.block_offsets.data(),
                             row.token_scales.data(), row.token_offsets.data()};
  format.encode_row(x.data(), head_dim, static_scale, sections, row.counts);
  format.decode_row(sections, head_dim, static_scale, row.decoded.data());
  return row;
}

}  // namespace kvanta::formats
