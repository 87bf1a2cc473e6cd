// Read view of one layer's KV cache: the offsets of each KV head's cells in a page's records, and the record that the
// page rule selects for a query.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "attention/batch.h"
#include "attention/page_classes.h"
#include "cache/gathered_pages.h"
#include "cache/page_pool.h"
#include "formats/scheme.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

// Layout of the first KV head's K or V cell: byte offsets from the record's start.
struct CellSide {
  formats::ElementType code = formats::ElementType::kBf16;
  int tokens = 0;
  int head_dim = 0;
  int64_t bytes = 0;  // size of the cell
  int64_t codes = 0;
  formats::Scaling scaling = {};
  int64_t block_scales = 0;  // sections that `scaling` uses
  int64_t block_offsets = 0;
  int64_t token_scales = 0;
  int64_t token_offsets = 0;
  int64_t channel_scales = 0;
  int64_t channel_offsets = 0;

  // A view without addresses, which MoveTo() sets.
  kernels::CellView View() const noexcept;
  // Moves a view of this side to another record: its start plus kv_head * PageCells::head_bytes.
  void MoveTo(const uint8_t* record, kernels::CellView& view) const noexcept;
};

inline kernels::CellView CellSide::View() const noexcept {
  return {.block_scales = {.type = scaling.block},
          .token_scales = {.type = scaling.token},
          .page_tokens = tokens,
          .head_dim = head_dim,
          .block = formats::BlockChannels(scaling, head_dim),
          .token_group = scaling.token_group};
}

inline void CellSide::MoveTo(const uint8_t* record, kernels::CellView& view) const noexcept {
  const auto fp16 = [record](int64_t section) { return reinterpret_cast<const uint16_t*>(record + section); };
  view.codes = record + codes;
  if (scaling.block != formats::ScaleType::kNone) view.block_scales.data = record + block_scales;
  if (scaling.token != formats::ScaleType::kNone) view.token_scales.data = record + token_scales;
  if (scaling.block_offset) view.block_offsets = fp16(block_offsets);
  if (scaling.token_offset) view.token_offsets = fp16(token_offsets);
  if (scaling.token_group != 0) {
    view.channel_scales = fp16(channel_scales);
    view.channel_offsets = fp16(channel_offsets);
  }
}

struct PageCells {
  CellSide k, v;
  CellSide unquantized;    // K's unquantized channels; 0 bytes if there are none
  int64_t head_bytes = 0;  // stride between KV heads
};

// One KV head's cells of a page, in the record that the page rule selects.
struct PageView {
  const PageCells* cells;
  const uint8_t* record;  // for CellSide::MoveTo
  int kv_head;
  cache::PageKind kind;
};

struct LayerView {
  LayerView(const formats::LayerScheme& scheme, const AttentionSpec& attention, const formats::LayerScales& scales,
            const cache::PagePool& pool);
  // A view of copies: the bases and bytes of their quantized and exact records.
  LayerView(const formats::LayerScheme& scheme, const AttentionSpec& attention, const formats::LayerScales& scales,
            const cache::GatheredPages& pages, const uint8_t* quantized_base, const uint8_t* exact_base);

  // The record that a query in page `own_page` reads of `page`, whose records are `ref`.
  cache::PageKind Kind(int64_t own_page, int64_t page, const cache::PageRef& ref) const noexcept {
    if (gathered != nullptr) {
      return gathered->IsExact(static_cast<int32_t>(page)) ? cache::PageKind::kExact : cache::PageKind::kQuantized;
    }
    return cache::ReadKind(rule, own_page, page, ref);
  }
  PageView View(int64_t own_page, int64_t page, const cache::PageRef& ref, int kv_head) const noexcept {
    const cache::PageKind kind = Kind(own_page, page, ref);
    const RecordPool& read = records[cache::KindIndex(kind)];
    // Forms no pointer to an absent record.
    const uint8_t* record = read.base + ref.Of(kind) * read.bytes + kv_head * read.cells.head_bytes;
    return {&read.cells, record, kv_head, kind};
  }
  const PageCells& Cells(cache::PageKind kind) const noexcept { return records[cache::KindIndex(kind)].cells; }
  // True if the layer has records of this kind.
  bool Has(cache::PageKind kind) const noexcept { return Cells(kind).head_bytes != 0; }

  // RecordPool of a kind, in the group's pool.
  struct RecordPool {
    const uint8_t* base = nullptr;  // start of the pool
    int64_t bytes = 0;              // per record
    PageCells cells;
  };

  const formats::LayerScheme* scheme;
  cache::PageRule rule;
  const AttentionSpec* attention;
  const formats::LayerScales* scales;
  RecordPool records[std::size(cache::kPageKinds)];
  const cache::GatheredPages* gathered = nullptr;  // null: the pages are a sequence's own
  PageClasses classes = {};

 private:
  LayerView(const formats::LayerScheme& scheme, const AttentionSpec& attention, const formats::LayerScales& scales);
};

}  // namespace kvanta::attention
