#include "attention/layer_view.h"

namespace kvanta::attention {
namespace {

CellSide SideOf(const formats::Side& side, int64_t cell) {
  const formats::CellSections& sections = side.sections;
  return {.code = side.format->code,
          .tokens = side.shape.tokens,
          .head_dim = side.shape.head_dim,
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

CellSide ExactSideOf(const formats::Side& side, int64_t cell) {
  return {.code = formats::ElementType::kBf16,
          .tokens = side.shape.tokens,
          .head_dim = side.shape.head_dim,
          .bytes = formats::LayerScheme::ExactCellBytes(side),
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
                     const formats::LayerScales& of_scales)
    : scheme(&of_scheme), rule(PageRuleOf(of_scheme)), attention(&of_attention), scales(&of_scales) {
  const auto cells = [this](cache::PageKind kind) -> PageCells& { return records[cache::KindIndex(kind)].cells; };
  cells(cache::PageKind::kQuantized) = {.k = SideOf(scheme->k, scheme->KCell(0)),
                                        .v = SideOf(scheme->v, scheme->VCell(0)),
                                        .unquantized = SideOfUnquantized(*scheme, scheme->KUnquantized(0)),
                                        .head_bytes = scheme->HeadBytes()};
  if (scheme->exact_open) {
    cells(cache::PageKind::kExact) = {.k = ExactSideOf(scheme->k, scheme->ExactKCell(0)),
                                      .v = ExactSideOf(scheme->v, scheme->ExactVCell(0)),
                                      .unquantized = SideOfUnquantized(*scheme, scheme->ExactKUnquantized(0)),
                                      .head_bytes = scheme->ExactHeadBytes()};
  }
  for (size_t i = 0; i < scheme->ages.size(); ++i) {
    const formats::AgeScheme& age = scheme->ages[i];
    const formats::AgeCells of_head = scheme->CellsOf(age, 0);
    cells(cache::kAgedKinds[i]) = {.k = SideOf(age.k, of_head.k),
                                   .v = SideOf(age.v, of_head.v),
                                   .unquantized = SideOfUnquantized(*scheme, of_head.unquantized),
                                   .head_bytes = age.head_bytes};
  }
}

LayerView::LayerView(const formats::LayerScheme& of_scheme, const AttentionSpec& of_attention,
                     const formats::LayerScales& of_scales, const cache::PagePool& pool)
    : LayerView(of_scheme, of_attention, of_scales) {
  for (const cache::PageKind kind : cache::kPageKinds) {
    RecordPool& of_kind = records[cache::KindIndex(kind)];
    of_kind.base = pool.Base(scheme->group, kind);
    of_kind.bytes = pool.RecordBytes(scheme->group, kind);
  }
  if (DividesPages(of_scheme, of_attention)) {
    classes = {.of = kLatentClasses, .first = pool.Rank(), .step = pool.Ranks()};
  }
}

LayerView::LayerView(const formats::LayerScheme& of_scheme, const AttentionSpec& of_attention,
                     const formats::LayerScales& of_scales, const cache::GatheredPages& pages,
                     const uint8_t* quantized_base, const uint8_t* exact_base)
    : LayerView(of_scheme, of_attention, of_scales) {
  const auto set = [this](cache::PageKind kind, const uint8_t* base, int64_t bytes) {
    records[cache::KindIndex(kind)].base = base;
    records[cache::KindIndex(kind)].bytes = bytes;
  };
  set(cache::PageKind::kQuantized, quantized_base, scheme->HeadBytes());
  set(cache::PageKind::kExact, exact_base, scheme->ExactHeadBytes());
  gathered = &pages;
}

}  // namespace kvanta::attention
