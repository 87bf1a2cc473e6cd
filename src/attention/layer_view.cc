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
                     const formats::LayerScales& of_scales, const cache::PagePool& pool)
    : LayerView(of_scheme, of_attention, of_scales,
                LayerRecords{.quantized_base = pool.Base(of_scheme.group, cache::PageKind::kQuantized),
                             .exact_base = pool.Base(of_scheme.group, cache::PageKind::kExact),
                             .quantized_bytes = pool.RecordBytes(of_scheme.group, cache::PageKind::kQuantized),
                             .exact_bytes = pool.RecordBytes(of_scheme.group, cache::PageKind::kExact)}) {}

LayerView::LayerView(const formats::LayerScheme& of_scheme, const AttentionSpec& of_attention,
                     const formats::LayerScales& of_scales, const LayerRecords& records)
    : scheme(&of_scheme),
      exact_pages(ExactPagesOf(of_scheme)),
      attention(&of_attention),
      scales(&of_scales),
      quantized_base(records.quantized_base),
      exact_base(records.exact_base),
      quantized_bytes(records.quantized_bytes),
      exact_bytes(records.exact_bytes),
      quantized{.k = SideOf(scheme->k, scheme->KCell(0)),
                .v = SideOf(scheme->v, scheme->VCell(0)),
                .unquantized = SideOfUnquantized(*scheme, scheme->KUnquantized(0)),
                .head_bytes = scheme->HeadBytes()} {
  if (!scheme->exact_open) return;
  exact = {.k = ExactSideOf(scheme->k, scheme->ExactKCell(0)),
           .v = ExactSideOf(scheme->v, scheme->ExactVCell(0)),
           .unquantized = SideOfUnquantized(*scheme, scheme->ExactKUnquantized(0)),
           .head_bytes = scheme->ExactHeadBytes()};
}

}  // namespace kvanta::attention
