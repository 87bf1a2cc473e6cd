#include "attention/layer_view.h"

namespace kvanta::attention {
namespace {

CellSide SideOf(const formats::Side& side, formats::CellShape shape, int64_t cell) {
  const formats::CellPlanes& planes = side.planes;
  return {.code = side.format->code,
          .tokens = shape.tokens,
          .head_dim = shape.head_dim,
          .bytes = planes.bytes,
          .codes = cell + planes.codes,
          .scaling = side.format->scaling,
          .block_scales = cell + planes.block_scales,
          .block_zeros = cell + planes.block_zeros,
          .token_scales = cell + planes.token_scales,
          .token_zeros = cell + planes.token_zeros,
          .channel_scales = cell + planes.channel_scales,
          .channel_zeros = cell + planes.channel_zeros};
}

CellSide SideOfBf16(formats::CellShape shape, int64_t bytes, int64_t cell) {
  return {
      .code = formats::Code::kBf16, .tokens = shape.tokens, .head_dim = shape.head_dim, .bytes = bytes, .codes = cell};
}

CellSide SideOfPlain(const formats::LayerScheme& scheme, int64_t cell) {
  return {.code = scheme.plain->code,
          .tokens = scheme.shape.tokens,
          .head_dim = scheme.PlainShape().head_dim,
          .bytes = scheme.PlainBytes(),
          .codes = cell};
}

}  // namespace

LayerView::LayerView(const formats::LayerScheme& of_scheme, const LayerAttention& of_attention,
                     const formats::LayerScales& of_scales, const cache::PageStore& store)
    : scheme(&of_scheme),
      attention(&of_attention),
      scales(&of_scales),
      quantized_base(store.Base(cache::PageKind::kQuantized)),
      exact_base(store.Base(cache::PageKind::kExact)),
      quantized_bytes(store.RecordBytes(cache::PageKind::kQuantized)),
      exact_bytes(store.RecordBytes(cache::PageKind::kExact)),
      quantized{.k = SideOf(scheme->k, scheme->shape, scheme->KCell(0)),
                .v = SideOf(scheme->v, scheme->shape, scheme->VCell(0)),
                .plain = SideOfPlain(*scheme, scheme->KPlain(0)),
                .head_bytes = scheme->HeadBytes()} {
  if (!scheme->exact_open) return;
  const int64_t bytes = scheme->ExactCellBytes();
  exact = {.k = SideOfBf16(scheme->shape, bytes, scheme->ExactKCell(0)),
           .v = SideOfBf16(scheme->shape, bytes, scheme->ExactVCell(0)),
           .plain = SideOfPlain(*scheme, scheme->ExactKPlain(0)),
           .head_bytes = scheme->ExactHeadBytes()};
}

}  // namespace kvanta::attention
