#include "attention/layer_view.h"

namespace kvanta::attention {
namespace {

CellSide SideOf(const formats::Side& side, formats::CellShape shape, int64_t cell) {
  const formats::CellSections& sections = side.sections;
  return {.code = side.format->code,
          .tokens = shape.tokens,
          .head_dim = shape.head_dim,
          .bytes = sections.bytes,
          .codes = cell + sections.codes,
          .scaling = side.format->scaling,
          .block_scales = cell + sections.block_scales,
          .block_offsets = cell + sections.block_offsets,
          .token_scales = cell + sections.token_scales,
          .token_offsets = cell + sections.token_offsets,
          .channel_scales = cell + sections.channel_scales,
          .channel_offsets = cell + sections.channel_offsets};
}

CellSide SideOfBf16(formats::CellShape shape, int64_t bytes, int64_t cell) {
  return {.code = formats::ElementType::kBf16,
          .tokens = shape.tokens,
          .head_dim = shape.head_dim,
          .bytes = bytes,
          .codes = cell};
}

CellSide SideOfUnquantized(const formats::LayerScheme& scheme, int64_t cell) {
  return {.code = scheme.unquantized_format->code,
          .tokens = scheme.shape.tokens,
          .head_dim = scheme.UnquantizedShape().head_dim,
          .bytes = scheme.UnquantizedBytes(),
          .codes = cell};
}

}  // namespace

LayerView::LayerView(const formats::LayerScheme& of_scheme, const AttentionSpec& of_attention,
                     const formats::LayerScales& of_scales, const cache::PagePool& pool)
    : scheme(&of_scheme), rule(PageRuleOf(of_scheme)), attention(&of_attention), scales(&of_scales) {
  for (const cache::PageKind kind : cache::kPageKinds) {
    records[cache::KindIndex(kind)] = {
        .base = pool.Base(scheme->group, kind), .bytes = pool.RecordBytes(scheme->group, kind), .cells = {}};
  }
  const auto cells = [this](cache::PageKind kind) -> PageCells& { return records[cache::KindIndex(kind)].cells; };
  cells(cache::PageKind::kQuantized) = {.k = SideOf(scheme->k, scheme->shape, scheme->KCell(0)),
                                        .v = SideOf(scheme->v, scheme->shape, scheme->VCell(0)),
                                        .unquantized = SideOfUnquantized(*scheme, scheme->KUnquantized(0)),
                                        .head_bytes = scheme->HeadBytes()};
  if (scheme->exact_open) {
    const int64_t bytes = scheme->ExactCellBytes();
    cells(cache::PageKind::kExact) = {.k = SideOfBf16(scheme->shape, bytes, scheme->ExactKCell(0)),
                                      .v = SideOfBf16(scheme->shape, bytes, scheme->ExactVCell(0)),
                                      .unquantized = SideOfUnquantized(*scheme, scheme->ExactKUnquantized(0)),
                                      .head_bytes = scheme->ExactHeadBytes()};
  }
  for (size_t i = 0; i < scheme->ages.size(); ++i) {
    const formats::AgeScheme& age = scheme->ages[i];
    const formats::AgeCells of_head = scheme->CellsOf(age, 0);
    cells(cache::kAgedKinds[i]) = {.k = SideOf(age.k, scheme->shape, of_head.k),
                                   .v = SideOf(age.v, scheme->shape, of_head.v),
                                   .unquantized = SideOfUnquantized(*scheme, of_head.unquantized),
                                   .head_bytes = age.head_bytes};
  }
}

}  // namespace kvanta::attention
