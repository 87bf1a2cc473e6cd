#include "attention/compressed_attention.h"

#include <algorithm>

#include "attention/partial_results.h"
#include "base/math.h"
#include "formats/cell_layout.h"

namespace kvanta::attention {

CompressedAttention::CompressedAttention(Device& device, const std::vector<LayerView>& layers, int page_size,
                                         const kernels::AttentionKernels& kernels, ThreadPool& threads,
                                         parallel::Communicator* ranks)
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
  if (ranks != nullptr) exchange_.emplace(*ranks, layers, page_size);
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

void CompressedAttention::MakePlan(const Batch& batch) {
  if (!exchange_) return;
  exchanged_rows_.resize(static_cast<size_t>(batch.rows));
  int64_t entries = 0;
  for (const LayerView& layer : layers_) {
    if (layer.scheme->IsRecurrent() || layer.attention->entries_layer < 0) continue;
    const formats::LayerScheme& scheme = *layers_[static_cast<size_t>(layer.attention->entries_layer)].scheme;
    for (const SequenceRows& sequence : batch.sequences) {
      const int64_t seen = scheme.EntriesAt(sequence.End() - 1);
      const int64_t top_k = layer.attention->index_topk;
      entries = std::max(entries, top_k == 0 ? seen : std::min(seen, top_k));
    }
  }
  exchange_->Reserve(entries);
}

const SequenceRows& CompressedAttention::SequenceOf(const Batch& batch, int64_t row) const noexcept {
  return *(std::ranges::upper_bound(batch.sequences, row, {}, &SequenceRows::first_row) - 1);
}

int64_t CompressedAttention::GetEntries(const Step& step, const LayerView& layer, int64_t first_row) noexcept {
  const LayerView& entries = layers_[static_cast<size_t>(layer.attention->entries_layer)];
  for (int64_t row = 0; first_row == 0 && row < step.batch.rows; ++row) {  // for all waves
    const SequenceRows& sequence = SequenceOf(step.batch, row);
    const Rows seen = RowsOf(step, layer, row, sequence.span.start + row - sequence.first_row);
    exchanged_rows_[static_cast<size_t>(row)] = {
        .table = sequence.span.pages[entries.scheme->group], .chosen = seen.chosen, .entries = seen.entries};
  }
  const auto rows = static_cast<size_t>(step.batch.rows - first_row);
  first_exchanged_ = first_row;
  const std::span<const EntryExchange::Row> all(exchanged_rows_);
  return first_row +
         static_cast<int64_t>(exchange_->Gather(entries, all.subspan(static_cast<size_t>(first_row), rows)));
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
void CompressedAttention::Gather(const LayerView& layer, const SequenceSpan& span, const Rows& rows, int64_t row,
                                 int64_t first, int64_t last, Workspace& workspace) const noexcept {
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
    const auto of_row = static_cast<size_t>(row - first_exchanged_);
    for (; index < std::min(last, rows.entries); ++index) {
      if (exchange_) {
        formats::StoreRow(formats::SideKind::kK, format, scheme.k.shape, scheme.k.sections, to_slot(index),
                          exchange_->RowAt(of_row, index), to_cell(index));
        continue;
      }
      const int64_t entry = rows.chosen.empty() ? index : rows.chosen[static_cast<size_t>(index)];
      const int64_t page = cache::PageOfEntry<int64_t>(entry, entries.row_tokens, page_size_);
      const uint8_t* cell = of_entries.View(page, page, table[page], 0).record + entries.KCell(0);
      const formats::ConstRowSections stored =
          formats::CanonicalRow(format, entries.k.sections, static_cast<int>(entry % entries.shape.tokens), cell);
      formats::StoreRow(formats::SideKind::kK, format, scheme.k.shape, scheme.k.sections, to_slot(index), stored,
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
  const SequenceRows& sequence = SequenceOf(step.batch, row);
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
    Gather(view, sequence.span, seen, row, first, last, workspace);
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
    if (!sinks.empty()) AddSink(sinks[static_cast<size_t>(heads.first) + static_cast<size_t>(head)], state);
    WriteResult(kernels_, scheme, state, workspace.sums.data() + head * width, out + head * head_dim);
  }
}

void CompressedAttention::Run(const Step& step, int layer, const QueryRows& rows,
                              std::vector<TileWorkspace>& workspaces) noexcept {
  const LayerView& view = layers_[static_cast<size_t>(layer)];
  const bool exchanges = exchange_ && view.attention->entries_layer >= 0;
  for (int64_t first = 0; first < step.batch.rows;) {
    const int64_t end = exchanges ? GetEntries(step, view, first) : step.batch.rows;
    AttendRows(step, layer, {.first = first, .end = end}, rows, workspaces);
    first = end;
  }
}

void CompressedAttention::AttendRows(const Step& step, int layer, const RowRange& range, const QueryRows& rows,
                                     std::vector<TileWorkspace>& workspaces) noexcept {
  // Threads divide the heads of a row if there are fewer rows; each copies what the row reads.
  const int64_t threads = std::ssize(workspaces_), heads = attention_[static_cast<size_t>(layer)].heads;
  const int64_t count = range.end - range.first, parts = std::clamp<int64_t>(threads / count, 1, heads);
  auto attend = [&](int64_t task, int worker) {
    const kernels::KernelScope scope(kernels_);
    const int64_t part = task % parts;
    const HeadRange of_task{.row = range.first + task / parts,
                            .first = static_cast<int>(heads * part / parts),
                            .end = static_cast<int>(heads * (part + 1) / parts)};
    Attend(step, layer, of_task, rows, workspaces_[static_cast<size_t>(worker)],
           workspaces[static_cast<size_t>(worker)]);
  };
  threads_.ForEach(count * parts, attend);
}

}  // namespace kvanta::attention
