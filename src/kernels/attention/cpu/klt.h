// Keys with uneven bits (formats/klt.h), decoded to int8 as trellis codes are. Included by isa_<isa>.cc after its
// KltKeys.
#pragma once

#include <cstdint>
#include <optional>

#include "formats/klt_group.h"
#include "kernels/attention/cpu/operands.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/trellis.h"

namespace kvanta::kernels {
namespace {

template <int kBits>
void ScoreKlt(const KeyPass& pass) {
  const formats::BitAllocation* allocation = pass.allocation;
  std::optional<formats::BitAllocation> uncalibrated;
  if (allocation == nullptr && pass.workspace_use != WorkspaceUse::kReuse) {
    allocation = &uncalibrated.emplace(formats::DefaultAllocation(pass.cell.head_dim, kBits));
  }
  ScoreTrellisKeys<kBits, CodeInt8>(pass, [&] { return KltKeys{*allocation}; });
}

// Keys whose token groups have scales and bits of their own (formats/klt_group.h). Prepared queries are f32 in the
// order of the channels: for each group they are scaled, put in the order of its codes, and quantized.
template <int kBits>
void ScoreKltGroups(const KeyPass& pass) {
  constexpr int kGroups = formats::kKltGroup / 16;
  const int head_dim = pass.cell.head_dim;
  const auto section_bytes =
      formats::GroupScaleBytes({.token_group = formats::kKltGroup, .channel_bits = true}, head_dim);
  const auto* section = reinterpret_cast<const uint8_t*>(pass.cell.channel_scales);
  alignas(64) uint8_t queries[kPassRows * (2 * kMaxHeadDim + 8 * kMaxBlocks)];
  float factors[kPassRows];
  KeyPass part = pass;
  part.query = queries;
  part.query_stride = QueryBytes<CodeInt8>(head_dim);
  part.row_scale = factors;
  formats::GroupChannels channels;
  for (int first = 0; first < pass.groups; first += kGroups, section += section_bytes) {
    channels.Read(section, head_dim, kBits);
    for (int row = 0; row < pass.rows; ++row) {
      alignas(64) float scaled[kMaxHeadDim];
      const auto* query = reinterpret_cast<const float*>(pass.query + row * pass.query_stride);
      for (int code = 0; code < head_dim; code += formats::kAllocationBlock) {
        const float* of_block = query + channels.Channel(code);
        for (int i = 0; i < formats::kAllocationBlock; ++i) scaled[code + i] = of_block[i] * channels.scale[code + i];
      }
      factors[row] =
          PrepareQuery<CodeInt8>(scaled, head_dim, 0, queries + row * part.query_stride) * pass.row_scale[row];
    }
    part.groups = pass.groups - first < kGroups ? pass.groups - first : kGroups;
    part.cell.codes = pass.cell.codes + int64_t{first} * 2 * kBits * head_dim;
    part.cell.token_scales.data = pass.cell.token_scales.data + int64_t{first} * 16 * 2;
    part.scores = pass.scores + first * 16;
    part.workspace = pass.workspace + int64_t{first} * 16 * head_dim;
    ScoreTrellisKeys<kBits, CodeInt8>(part, [&] { return KltKeys{channels.blocks}; });
    part.prefetch = {};
  }
}

}  // namespace
}  // namespace kvanta::kernels
