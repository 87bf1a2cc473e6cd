#include "formats/cell.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "base/math.h"
#include "formats/names.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

// Channels that head_dim must be a multiple of.
int ChannelStep(const Format& format, int head_dim) {
  return std::max(BlockChannels(format.scaling, head_dim), CodeChannels(format.code));
}

// Names of the formats that support head_dim in layers with latents, or with K and V apart, for the error message.
std::string FormatsFor(int head_dim, bool latents) {
  const MlaSupport excluded = latents ? MlaSupport::kNo : MlaSupport::kRequired;
  const auto divides = [=](const Format& format) { return head_dim % ChannelStep(format, head_dim) == 0; };
  return NamesOf([=](const Format& format) {
    return format.latents != excluded && divides(format) && divides(OnSide(format, false));
  });
}

void CheckHeadDim(int head_dim) {
  if (head_dim < kMinHeadDim || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
    throw InputError(
        fmt::format("head_dim {}: must be a multiple of 8 from {} to {}", head_dim, kMinHeadDim, kMaxHeadDim));
  }
}

// Sections of the row of `token`, as RowSections or ConstRowSections.
template <class Sections, class Byte>
Sections RowAt(const Format& format, const CellSections& sections, int token, Byte* cell) noexcept {
  const auto at = [&](int64_t section, int elements, int bytes) {
    return cell + section + int64_t{token} * elements * bytes;
  };
  const Scaling& scaling = format.scaling;
  return {cell + sections.codes + token * sections.row_bytes,
          at(sections.block_scales, sections.blocks, Bytes(scaling.block)),
          at(sections.block_offsets, sections.blocks, 2), at(sections.token_scales, 1, Bytes(scaling.token)),
          at(sections.token_offsets, 1, 2)};
}

template <class Sections, class Byte>
Sections TokenGroupAt(const Format& format, const CellSections& sections, int head_dim, int group,
                      Byte* cell) noexcept {
  const Scaling& scaling = format.scaling;
  const int first_token = group * scaling.token_group;
  return {cell + sections.codes + first_token * sections.row_bytes,
          cell + sections.token_scales + first_token * Bytes(scaling.token),
          cell + sections.channel_scales + group * GroupScaleBytes(scaling, head_dim),
          cell + sections.channel_offsets + group * GroupOffsetBytes(scaling, head_dim)};
}

}  // namespace

CellShape PaddedShape(const Format& format, CellShape shape) {
  CheckHeadDim(shape.head_dim);
  return {.tokens = shape.tokens,
          .head_dim = static_cast<int>(RoundUp(shape.head_dim, ChannelStep(format, shape.head_dim)))};
}

std::string DescribePadding(const Format& format, int head_dim) {
  const int step = ChannelStep(format, head_dim);
  if (head_dim % step == 0) return "";
  return fmt::format(
      "{} has {} of {} channels, which do not divide head_dim {} ({} % {} = {}); formats that take it: {}", format.name,
      step == format.scaling.channels ? "blocks" : "units", step, head_dim, head_dim, step, head_dim % step,
      FormatsFor(head_dim, format.latents == MlaSupport::kRequired));
}

CellSections PlanCell(const Format& format, CellShape shape) {
  if (shape.tokens != 16 && shape.tokens != 32 && shape.tokens != 64 && shape.tokens != 128) {
    throw InputError(fmt::format("page size {}: must be 16, 32, 64 or 128 tokens", shape.tokens));
  }
  return PlanRows(format, shape);
}

CellSections PlanRows(const Format& format, CellShape shape) {
  if (shape.tokens < 1) throw InputError(fmt::format("{} tokens: at least one is needed", shape.tokens));
  CheckHeadDim(shape.head_dim);
  if (const std::string padding = DescribePadding(format, shape.head_dim); !padding.empty()) throw InputError(padding);
  const Scaling& scaling = format.scaling;
  if (scaling.token_group != 0 && shape.tokens % scaling.token_group != 0) {
    throw InputError(fmt::format("{} has scales over {} tokens, which do not divide the page of {}; take pages of {}",
                                 format.name, scaling.token_group, shape.tokens,
                                 scaling.token_group == 32 ? "32, 64 or 128" : "64 or 128"));
  }
  CellSections sections;
  sections.row_bytes = int64_t{shape.head_dim} * format.code_bits / 8;
  sections.blocks = scaling.channels == 0 ? 0 : shape.head_dim / BlockChannels(scaling, shape.head_dim);
  const int64_t groups = scaling.token_group == 0 ? 0 : shape.tokens / scaling.token_group;
  int64_t end = 0;
  const auto section = [&end](int64_t bytes) {
    const int64_t begin = end;
    end += RoundUp(bytes, 16);  // no padding in a page, which has a multiple of 16 tokens
    return begin;
  };
  const int64_t tokens = shape.tokens;
  sections.codes = section(tokens * sections.row_bytes);
  sections.block_scales = section(tokens * sections.blocks * Bytes(scaling.block));
  sections.block_offsets = section(scaling.block_offset ? tokens * sections.blocks * 2 : 0);
  sections.token_scales = section(tokens * Bytes(scaling.token));
  sections.token_offsets = section(scaling.token_offset ? tokens * 2 : 0);
  sections.channel_scales = section(groups * GroupScaleBytes(scaling, shape.head_dim));
  sections.channel_offsets = section(groups * GroupOffsetBytes(scaling, shape.head_dim));
  sections.bytes = end;
  return sections;
}

RowSections CanonicalRow(const Format& format, const CellSections& sections, int token, uint8_t* cell) noexcept {
  return RowAt<RowSections>(format, sections, token, cell);
}
ConstRowSections CanonicalRow(const Format& format, const CellSections& sections, int token,
                              const uint8_t* cell) noexcept {
  return RowAt<ConstRowSections>(format, sections, token, cell);
}
GroupSections CanonicalTokenGroup(const Format& format, const CellSections& sections, int head_dim, int group,
                                  uint8_t* cell) noexcept {
  return TokenGroupAt<GroupSections>(format, sections, head_dim, group, cell);
}
ConstGroupSections CanonicalTokenGroup(const Format& format, const CellSections& sections, int head_dim, int group,
                                       const uint8_t* cell) noexcept {
  return TokenGroupAt<ConstGroupSections>(format, sections, head_dim, group, cell);
}

}  // namespace kvanta::formats
