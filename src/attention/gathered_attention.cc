#include "attention/gathered_attention.h"

#include <algorithm>

#include "base/math.h"
#include "formats/cell_layout.h"

namespace kvanta::attention {

GatheredAttention::GatheredAttention(Device& device, const std::vector<LayerView>& layers, int top_k,
                                     const kernels::AttentionKernels& kernels, ThreadPool& threads)
    : layers_(layers), kernels_(kernels), threads_(threads), workspaces_(static_cast<size_t>(threads.Threads())) {
  int64_t pages = 0, quantized_bytes = 0, exact_bytes = 0;
  for (const LayerView& layer : layers) {
    schemes_.push_back(*layer.scheme);
    formats::LayerScheme& scheme = schemes_.back();
    scheme.offset = scheme.exact_offset = 0;
    if (layer.attention->index_topk == 0 || scheme.keys_only || scheme.shared_kv) continue;
    page_size_ = scheme.shape.tokens;
    rows_ = std::max(rows_, layer.attention->heads);
    head_dim_ = std::max(head_dim_, scheme.v.shape.head_dim);
    const int64_t full = CeilDiv(top_k, page_size_);
    // Pages of each kind may be partly filled.
    const int64_t exact = scheme.exact_open ? std::min(full + 2, int64_t{scheme.sink_pages} + scheme.exact_pages) : 0;
    pages = std::max(pages, full + (scheme.exact_open ? 2 : 0));
    quantized_bytes = std::max(quantized_bytes, (full + 1) * scheme.HeadBytes());
    exact_bytes = std::max(exact_bytes, exact * scheme.ExactHeadBytes());
  }
  max_splits_ = CeilDiv(pages * page_size_, int64_t{kSplitTokens});
  for (Workspace& workspace : workspaces_) {
    workspace.quantized = device.Allocate(static_cast<size_t>(quantized_bytes));
    if (exact_bytes != 0) workspace.exact = device.Allocate(static_cast<size_t>(exact_bytes));
    workspace.table.resize(static_cast<size_t>(pages));
  }
  const auto results = static_cast<size_t>((threads.Threads() - 1) * max_splits_ * rows_);
  split_states_.resize(results);
  split_out_.resize(results * static_cast<size_t>(head_dim_));
}

void GatheredAttention::Gather(const LayerView& layer, const cache::PageRef* table, const cache::GatheredPages& pages,
                               const SparseRow& row, std::span<const int32_t> positions, int64_t first, int64_t last,
                               Workspace& workspace) const noexcept {
  const formats::LayerScheme& scheme = *layer.scheme;
  const formats::CellShape unquantized_shape = scheme.UnquantizedShape();
  const formats::CellSections exact_sections = formats::Bf16Sections(scheme.k.shape),
                              unquantized_sections = scheme.UnquantizedSections();
  const int64_t own_page = row.position / page_size_;
  for (int64_t index = first; index < last; ++index) {
    const auto page = static_cast<int32_t>(index);
    const bool exact = pages.IsExact(page);
    const int64_t record = pages.RecordOf(page);
    const formats::Format& format = exact ? ExactFormat() : *scheme.k.format;
    const formats::CellSections& sections = exact ? exact_sections : scheme.k.sections;
    uint8_t* to = exact ? workspace.exact.data() + record * scheme.ExactHeadBytes()
                        : workspace.quantized.data() + record * scheme.HeadBytes();
    cache::PageRef& ref = workspace.table[static_cast<size_t>(index)];
    ref = {};
    ref.Of(exact ? cache::PageKind::kExact : cache::PageKind::kQuantized) = static_cast<cache::PageId>(record);
    const int32_t* chosen = positions.data() + pages.FirstOf(page);
    for (int slot = 0, tokens = pages.TokensOf(page); slot < tokens; ++slot) {
      const int64_t from_page = chosen[slot] / page_size_;
      const int from_slot = chosen[slot] % page_size_;
      const uint8_t* cell = layer.View(own_page, from_page, table[from_page], 0).record +
                            (exact ? scheme.ExactKCell(0) : scheme.KCell(0));
      formats::CopyKeyRow(format, scheme.k.shape, sections, from_slot, cell, slot, to);
      formats::CopyKeyRow(*scheme.unquantized_format, unquantized_shape, unquantized_sections, from_slot,
                          cell + sections.bytes, slot, to + sections.bytes);
    }
  }
}

void GatheredAttention::Run(const Batch& batch, const ChosenTokens& chosen, int layer, const float* q, int64_t q_stride,
                            float* out, std::vector<TileWorkspace>& workspaces) noexcept {
  const LayerView& view = layers_[static_cast<size_t>(layer)];
  const formats::LayerScheme& scheme = schemes_[static_cast<size_t>(layer)];
  const int64_t out_stride = int64_t{view.attention->heads} * scheme.shape.head_dim;
  const int64_t heads = view.attention->heads, pages_of_split = kSplitTokens / page_size_;
  // Calls attend(TileAttention) for splits [first, last) of a row, as far as there are.
  const auto attend_splits = [&](size_t index, int64_t first, int64_t last, int worker, bool gathers, auto attend) {
    const SparseRow& row = chosen.rows[index];
    const std::span<const int32_t> positions = chosen.Of(index);
    Workspace& workspace = workspaces_[static_cast<size_t>(worker)];
    const auto pages =
        cache::GatheredPages::Of(view.rule.exact, page_size_, static_cast<int32_t>(row.position / page_size_),
                                 positions.data(), static_cast<int32_t>(positions.size()));
    const int64_t last_page = std::min<int64_t>(pages.Pages(), last * pages_of_split);
    if (gathers) {
      if (first * pages_of_split >= last_page) return false;
      const cache::PageRef* table = batch.sequences[row.sequence].span.pages[scheme.group];
      Gather(view, table, pages, row, positions, first * pages_of_split, last_page, workspace);
    }
    const LayerView gathered(scheme, *view.attention, *view.scales, pages, workspace.quantized.data(),
                             workspace.exact.data());
    const int64_t splits = CeilDiv(int64_t{pages.Pages()}, pages_of_split);
    const int64_t last_slot = int64_t{pages.Pages()} * page_size_ - 1;
    const QueryTile tile{.first = last_slot,
                         .tokens = 1,
                         .last_key = last_slot,
                         .first_split = first,
                         .last_split = std::min(last, splits)};
    TileWorkspace& tile_workspace = workspaces[static_cast<size_t>(worker)];
    tile_workspace.InvalidateQueries();
    TileAttention attention(kernels_, gathered, tile, tile.first_split, tile.last_split, workspace.table.data(),
                            {.q = q + row.row * q_stride, .q_stride = q_stride, .out = out + row.row * out_stride},
                            tile_workspace);
    attend(attention);
    return true;
  };
  if (chosen.rows.size() >= workspaces_.size() || max_splits_ == 1) {
    auto attend = [&](int64_t index, int worker) {
      const kernels::KernelScope scope(kernels_);
      attend_splits(static_cast<size_t>(index), 0, max_splits_, worker, true,
                    [](TileAttention& attention) { attention.Finish(); });
    };
    return threads_.ForEach(static_cast<int64_t>(chosen.rows.size()), attend);
  }
  const auto states_of = [&](int64_t task) { return split_states_.data() + task * heads; };
  const auto out_of = [&](int64_t task) { return split_out_.data() + task * heads * scheme.v.shape.head_dim; };
  auto attend = [&](int64_t task, int worker) {
    const kernels::KernelScope scope(kernels_);
    const int64_t split = task % max_splits_;
    attend_splits(static_cast<size_t>(task / max_splits_), split, split + 1, worker, true,
                  [&](TileAttention& attention) { attention.StoreSplitResult(states_of(task), out_of(task)); });
  };
  threads_.ForEach(static_cast<int64_t>(chosen.rows.size()) * max_splits_, attend);
  auto combine = [&](int64_t index, int worker) {
    const int64_t task = index * max_splits_;
    attend_splits(static_cast<size_t>(index), 0, max_splits_, worker, false,
                  [&](TileAttention& attention) { attention.CombineSplits(0, states_of(task), out_of(task)); });
  };
  threads_.ForEach(static_cast<int64_t>(chosen.rows.size()), combine);
}

}  // namespace kvanta::attention
