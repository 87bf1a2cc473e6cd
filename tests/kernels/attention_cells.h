// Cells with chosen codes, for the tests of attention kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "formats/bytes.h"
#include "formats/cell_layout.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/reference/attention.h"

namespace kvanta::kernels {

// A cell in the cache's layout whose codes are consecutive numbers from `first` on, and their decoded values.
struct Cell {
  formats::CellShape shape;
  formats::CellSections sections;
  std::vector<uint8_t> bytes;
  std::vector<float> values;  // [tokens][head_dim]
  CellView view;
};

// Fills scales that differ from element to element, near 1 but for E4M3, and offsets near -2, in their storage type.
inline void FillScales(formats::ScaleType type, uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = 1.0f + static_cast<float>(i % 7) / 1024.0f;
    switch (type) {
      case formats::ScaleType::kNone:
        return;
      case formats::ScaleType::kF32:
        formats::StoreBytes(bytes + 4 * i, value);
        break;
      case formats::ScaleType::kFp16:
        formats::StoreBytes(bytes + 2 * i, static_cast<uint16_t>(0x3c00 + i % 7));
        break;
      case formats::ScaleType::kE4M3:
        bytes[i] = static_cast<uint8_t>(1 + 5 * i % 126);  // all but 0 and NaN, subnormals included
        break;
      case formats::ScaleType::kE8M0:
        bytes[i] = static_cast<uint8_t>(125 + i % 5);
    }
  }
}
inline void FillOffsets(bool present, uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; present && i < count; ++i) {
    formats::StoreBytes(bytes + 2 * i, static_cast<uint16_t>(0xc000 + i % 5));
  }
}

// Fills the channels of a token group with all deviations, and bits that differ from block to block (klt_group.h).
inline void FillChannelBits(int mean_bits, int head_dim, uint8_t* section) {
  const auto set = [](uint8_t* nibbles, int index, int value) {
    nibbles[index / 2] = static_cast<uint8_t>(nibbles[index / 2] | value << 4 * (index % 2));
  };
  for (int channel = 0; channel < head_dim; ++channel) set(section, channel, 5 * channel % 16);
  const int blocks = head_dim / 8;
  for (int block = 0; block < blocks; ++block) {
    const int more = block % 4 < 2 ? block % 4 + 1 : 1 - block % 4;  // 1, 2, -1, -2
    set(section + head_dim / 2, block, mean_bits + (block < blocks / 4 * 4 ? more : 0));
  }
}

// A workspace of the kernels, shared by all calls.
inline uint8_t* Workspace() {
  alignas(64) static uint8_t workspace[kWorkspaceBytes];
  return workspace;
}

// A whole call of a value kernel.
inline void AccumulateValues(const ValueKernel& kernel, const ValuePass& pass) {
  if (kernel.load != nullptr) kernel.load(pass);
  kernel.accumulate(pass);
}

inline int Tokens(const formats::Format& format) {
  return std::max(16, format.scaling.token_group);
}
inline int MinHeadDim(const formats::Format& format) {
  return std::max(
      {8, format.scaling.allow_partial_block ? 8 : format.scaling.channels, formats::CodeChannels(format.code)});
}

// Cell shapes that a format is tested with: the smallest, and one that kernels process in whole tiles.
inline std::array<formats::CellShape, 2> ShapesOf(const formats::Format& format) {
  const int head_dim = MinHeadDim(format);
  return {formats::CellShape{Tokens(format), head_dim}, formats::CellShape{64, std::max(64, head_dim)}};
}

inline Cell MakeCell(const formats::Format& format, formats::SideKind kind, formats::CellShape shape, uint32_t first) {
  const formats::Scaling& scaling = format.scaling;
  const auto [tokens, head_dim] = shape;
  Cell cell{.shape = {.tokens = tokens, .head_dim = head_dim}, .sections = {}, .bytes = {}, .values = {}, .view = {}};
  cell.sections = formats::PlanCell(format, cell.shape);
  std::vector<uint8_t> canonical(static_cast<size_t>(cell.sections.bytes));
  uint32_t code = first;
  for (int64_t i = 0; i < tokens * cell.sections.row_bytes; ++code) {
    const int width = std::max(1, format.code_bits / 8);
    std::memcpy(&canonical[static_cast<size_t>(i)], &code, static_cast<size_t>(width));
    i += width;
  }
  const int64_t blocks = int64_t{tokens} * cell.sections.blocks;
  FillScales(scaling.block, canonical.data() + cell.sections.block_scales, blocks);
  FillOffsets(scaling.block_offset, canonical.data() + cell.sections.block_offsets, blocks);
  FillScales(scaling.token, canonical.data() + cell.sections.token_scales, tokens);
  FillOffsets(scaling.token_offset, canonical.data() + cell.sections.token_offsets, tokens);
  if (scaling.channel_bits) {
    for (int group = 0; group < tokens / scaling.token_group; ++group) {
      FillChannelBits(
          format.code_bits, head_dim,
          canonical.data() + cell.sections.channel_scales + group * formats::GroupScaleBytes(scaling, head_dim));
    }
  } else if (scaling.token_group != 0) {
    FillScales(formats::ScaleType::kFp16, canonical.data() + cell.sections.channel_scales,
               tokens / scaling.token_group * head_dim);
    FillOffsets(true, canonical.data() + cell.sections.channel_offsets, tokens / scaling.token_group * head_dim);
  }
  cell.bytes.resize(canonical.size());
  formats::FromCanonical(kind, format, cell.shape, cell.sections, canonical.data(), cell.bytes.data());
  cell.values.resize(static_cast<size_t>(tokens * head_dim));
  reference::DecodeCell(kind, format, cell.shape, cell.sections, cell.bytes.data(), 1.0f, tokens, cell.values.data());
  const auto fp16 = [&cell](int64_t section) { return reinterpret_cast<const uint16_t*>(cell.bytes.data() + section); };
  cell.view = {.codes = cell.bytes.data() + cell.sections.codes,
               .page_tokens = tokens,
               .head_dim = head_dim,
               .block = formats::BlockChannels(scaling, head_dim),
               .token_group = scaling.token_group};
  if (scaling.block != formats::ScaleType::kNone) {
    cell.view.block_scales = {cell.bytes.data() + cell.sections.block_scales, scaling.block};
  }
  if (scaling.token != formats::ScaleType::kNone) {
    cell.view.token_scales = {cell.bytes.data() + cell.sections.token_scales, scaling.token};
  }
  if (scaling.block_offset) cell.view.block_offsets = fp16(cell.sections.block_offsets);
  if (scaling.token_offset) cell.view.token_offsets = fp16(cell.sections.token_offsets);
  if (scaling.token_group != 0) {
    cell.view.channel_scales = fp16(cell.sections.channel_scales);
    cell.view.channel_offsets = fp16(cell.sections.channel_offsets);
  }
  return cell;
}

}  // namespace kvanta::kernels
