#include "attention/compressed_attention.h"

#include <algorithm>
#include <cmath>

#include "attention/partial_results.h"
#include "base/math.h"
#include "formats/cell_layout.h"

namespace kvanta::attention {

CompressedAttention::CompressedAttention(Device& device, const std::vector<LayerView>& layers, int page_size,
                                         const kernels::AttentionKernels& kernels, ThreadPool& threads)
    : layers_(layers),
      page_size_(page_size),
      kernels_(kernels),
      threads_(threads),
      workspaces_(static_cast<size_t>(threads.Threads())) {
  int64_t page_bytes = 0, heads = 0, head_dim = 0;
  for (const LayerView& layer : layers) {
    formats::LayerScheme& scheme = schemes_.emplace_back(*layer.scheme);
    scheme.offset = 0;
    AttentionSpec& attention = attention_.emplace_back(*layer.attention);
    attention.visibility = {};
    attention.sinks.clear();
    if (!scheme.shared_kv || scheme.HasEntries()) continue;
    page_bytes = std::max(page_bytes, scheme.HeadBytes());
    heads = std::max<int64_t>(heads, attention.heads);
    head_dim = std::max<int64_t>(head_dim, scheme.v.shape.head_dim);
  }
  const int64_t pages = kSplitTokens / page_size;
  for (Workspace& workspace : workspaces_) {
    workspace.pages = device.Allocate(static_cast<size_t>(pages * page_bytes));
    for (int64_t page = 0; page < pages; ++page) {
      workspace.table.push_back({.quantized = static_cast<cache::PageId>(page)});
    }
    workspace.states.resize(static_cast<size_t>(heads));
    workspace.totals.resize(static_cast<size_t>(heads));
    workspace.out.resize(static_cast<size_t>(heads * head_dim));
    workspace.sums.resize(static_cast<size_t>(heads * head_dim));
  }
}

CompressedAttention::Rows CompressedAttention::RowsOf(const Step& step, const LayerView& layer, int64_t row,
                                                      int64_t position) const noexcept {
  const AttentionSpec& attention = *layer.attention;
  Rows rows;
  rows.first_token = attention.visibility.First(position);
  rows.tokens = position + 1 - rows.first_token;
  if (attention.entries_layer < 0) return rows;
  rows.entries = layers_[static_cast<size_t>(attention.entries_layer)].scheme->EntriesAt(position);
  if (attention.index_topk == 0 || rows.entries <= attention.index_topk) return rows;
  rows.chosen = step.chosen.OfRow(row);
  rows.entries = std::ssize(rows.chosen);
  return rows;
}

// Copies rows [first, last) of a query to the pages of the workspace.
void CompressedAttention::Gather(const LayerView& layer, const SequenceSpan& span, const Rows& rows, int64_t first,
                                 int64_t last, Workspace& workspace) const noexcept {
  const formats::LayerScheme& scheme = *layer.scheme;
  const formats::Format& format = *scheme.k.format;
  const auto to_cell = [&](int64_t index) {
    return workspace.pages.data() + (index - first) / page_size_ * scheme.HeadBytes();
  };
  const auto to_slot = [&](int64_t index) { return static_cast<int>((index - first) % page_size_); };
  int64_t index = first;
  if (index < std::min(last, rows.entries)) {
    const LayerView& of_entries = layers_[static_cast<size_t>(layer.attention->entries_layer)];
    const formats::LayerScheme& entries = *of_entries.scheme;
    const cache::PageRef* table = span.pages[entries.group];
    for (; index < std::min(last, rows.entries); ++index) {
      const int64_t entry = rows.chosen.empty() ? index : rows.chosen[static_cast<size_t>(index)];
      const int64_t page = ((entry + 1) * entries.row_tokens - 1) / page_size_;
      const uint8_t* cell = of_entries.View(page, page, table[page], 0).record + entries.KCell(0);
      const formats::ConstRowSections row =
          formats::CanonicalRow(format, entries.k.sections, static_cast<int>(entry % entries.shape.tokens), cell);
      formats::StoreRow(formats::SideKind::kK, format, scheme.k.shape, scheme.k.sections, to_slot(index), row,
                        to_cell(index));
    }
  }
  const cache::PageRef* table = span.pages[scheme.group];
  for (; index < last; ++index) {
    const int64_t token = rows.first_token + index - rows.entries, page = token / page_size_;
    const uint8_t* cell = layer.View(page, page, table[page], 0).record + scheme.KCell(0);
    formats::CopyKeyRow(format, scheme.k.shape, scheme.k.sections, static_cast<int>(token % page_size_), cell,
                        to_slot(index), to_cell(index));
  }
}

void CompressedAttention::Attend(const Step& step, int layer, const HeadRange& heads, const QueryRows& rows,
                                 Workspace& workspace, TileWorkspace& tile_workspace) const noexcept {
  const LayerView& view = layers_[static_cast<size_t>(layer)];
  const formats::LayerScheme& scheme = schemes_[static_cast<size_t>(layer)];
  AttentionSpec attention = attention_[static_cast<size_t>(layer)];  // has no sinks, so nothing is allocated
  const int64_t head_dim = attention.head_dim, out_stride = attention.heads * head_dim, row = heads.row;
  attention.heads = heads.end - heads.first;
  const int64_t width = scheme.v.shape.head_dim;
  const SequenceRows& sequence =
      *(std::ranges::upper_bound(step.batch.sequences, row, {}, &SequenceRows::first_row) - 1);
  const Rows seen = RowsOf(step, view, row, sequence.span.start + row - sequence.first_row);
  float* out = rows.out + row * out_stride + heads.first * head_dim;
  const QueryRows own{
      .q = rows.q + row * rows.q_stride + heads.first * head_dim, .q_stride = rows.q_stride, .out = out};
  QueryTile tile{.tokens = 1, .last_split = 1};  // one address: queries are prepared once
  tile_workspace.InvalidateQueries();
  std::fill_n(workspace.totals.begin(), attention.heads, kEmptyState);
  std::fill_n(workspace.sums.begin(), attention.heads * width, 0.0F);
  for (int64_t first = 0; first < seen.Count(); first += kSplitTokens) {
    const int64_t last = std::min(seen.Count(), first + kSplitTokens);
    Gather(view, sequence.span, seen, first, last, workspace);
    const auto count = static_cast<int32_t>(last - first);
    const auto pages = static_cast<int32_t>(CeilDiv(count, page_size_));
    const cache::GatheredPages gathered{.page_size = page_size_, .tokens = {0, count, 0}, .ends = {0, pages, pages}};
    const LayerView copies(scheme, attention, *view.scales, gathered, workspace.pages.data(), nullptr);
    tile.first = tile.last_key = int64_t{pages} * page_size_ - 1;
    TileAttention(kernels_, copies, tile, 0, 1, workspace.table.data(), own, tile_workspace)
        .StoreSplitResult(workspace.states.data(), workspace.out.data());
    for (int head = 0; head < attention.heads; ++head) {
      kernels_.combine(workspace.totals[static_cast<size_t>(head)], workspace.sums.data() + head * width,
                       workspace.states[static_cast<size_t>(head)], workspace.out.data() + head * width, width);
    }
  }
  const std::vector<float>& sinks = view.attention->sinks;
  for (int head = 0; head < attention.heads; ++head) {
    kernels::SoftmaxState state = workspace.totals[static_cast<size_t>(head)];
    if (!sinks.empty()) {
      state.sum +=
          std::exp2(sinks[static_cast<size_t>(heads.first) + static_cast<size_t>(head)] * kernels::kLog2E - state.max);
    }
    WriteResult(kernels_, scheme, state, workspace.sums.data() + head * width, out + head * head_dim);
  }
}

void CompressedAttention::Run(const Step& step, int layer, const QueryRows& rows,
                              std::vector<TileWorkspace>& workspaces) noexcept {
  // Threads divide the heads of a row if there are fewer rows; each copies what the row reads.
  const int64_t threads = std::ssize(workspaces_), heads = attention_[static_cast<size_t>(layer)].heads;
  const int64_t parts = std::clamp<int64_t>(threads / step.batch.rows, 1, heads);
  auto attend = [&](int64_t task, int worker) {
    const kernels::KernelScope scope(kernels_);
    const int64_t part = task % parts;
    const HeadRange range{.row = task / parts,
                          .first = static_cast<int>(heads * part / parts),
                          .end = static_cast<int>(heads * (part + 1) / parts)};
    Attend(step, layer, range, rows, workspaces_[static_cast<size_t>(worker)], workspaces[static_cast<size_t>(worker)]);
  };
  threads_.ForEach(step.batch.rows * parts, attend);
}

}  // namespace kvanta::attention
