#include "attention/tile_attention.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/kernels_of_format.h"
#include "attention/partial_results.h"
#include "base/math.h"
#include "formats/transform.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using kernels::AttentionKernels;
using kernels::kMaxHeadDim;
using kernels::kMaxPageTokens;
using kernels::kPassRows;
using kernels::WorkspaceUse;

}  // namespace

TileAttention::TileAttention(const AttentionKernels& kernels, const LayerView& layer, const QueryTile& tile,
                             int64_t first_split, int64_t last_split, const cache::PageRef* pages, QueryRows rows,
                             TileWorkspace& workspace) noexcept
    : kernels_(kernels),
      layer_(layer),
      tile_(tile),
      first_split_(first_split),
      last_split_(last_split),
      reads_(layer, tile, first_split, last_split, pages, rows, kernels.two_part_prefetch_bytes),
      work_(workspace),
      group_(layer.attention->heads / layer.attention->kv_heads),
      head_dim_(layer.scheme->shape.head_dim),
      key_dim_(layer.scheme->k.shape.head_dim),
      value_dim_(layer.scheme->v.shape.head_dim),
      page_size_(layer.scheme->shape.tokens),
      visibility_(layer.attention->visibility),
      shares_cell_(layer.scheme->SharesCell()),
      has_bias_(layer.scheme->k.mean && (layer.attention->softcap > 0 || !layer.attention->sinks.empty())),
      has_bit_allocation_(layer.scheme->k.query),
      value_scales_(layer.scheme->v.format->scaling.per_head ? layer.scales->v.scale.data() : nullptr) {
  for (const PageKind kind : cache::kPageKinds) {
    if (layer.Has(kind)) PlanPasses(kind);
  }
}

// Sets what the pages of a kind of record have in common.
void TileAttention::PlanPasses(PageKind kind) noexcept {
  const PageCells& cells = layer_.Cells(kind);
  const bool exact = kind == PageKind::kExact;
  Passes& passes = passes_[cache::KindIndex(kind)].emplace(Passes{});  // clang 14 does not construct it in place
  passes.key_kernel = exact ? &kernels_.exact_keys : &KeyKernelOf(kernels_, cells.k.code, cells.k.scaling);
  passes.value_kernel = exact ? &kernels_.exact_values : &kernels_.values[Index(cells.v.code)];
  passes.keys = {.cell = cells.k.View(),
                 .query_stride = work_.query_stride_,
                 .scores = work_.scores_,
                 .workspace = work_.workspace_};
  passes.queries = cache::KindIndex(kind);
  if (cells.unquantized.bytes != 0) {
    passes.unquantized_kernel = &UnquantizedKeyKernel(kernels_, cells.unquantized.code);
    passes.unquantized = {.cell = cells.unquantized.View(),
                          .query_stride = work_.query_stride_,
                          .scores = work_.unquantized_scores_,
                          .workspace = work_.workspace_};
  }
  const bool packs = passes.value_kernel->softmax != nullptr && cells.v.scaling.token == formats::ScaleType::kNone &&
                     cells.v.scaling.block == formats::ScaleType::kNone;
  passes.softmax_kernel = packs ? passes.value_kernel->softmax : kernels_.softmax;
  passes.softmax = {.page_tokens = page_size_,
                    .softcap = layer_.attention->softcap,
                    .scores = work_.scores_,
                    .operands = work_.workspace_,
                    .rescale = work_.rescale_};
  passes.values = {.cell = cells.v.View(),
                   .p = packs ? nullptr : work_.scores_,
                   .rescale = work_.rescale_,
                   .out_stride = value_dim_,
                   .workspace = work_.workspace_};
}

// Transforms and prepares the query rows, unless the workspace still has them from the previous task.
void TileAttention::PrepareQueries() noexcept {
  Kinds kinds = {};
  reads_.VisitSplits([&](int64_t split) {
    const SplitPages pages = reads_.PagesOf(split);
    for (int64_t page = pages.first; page < pages.end; page += pages.step) {
      kinds[cache::KindIndex(reads_.Kind(page))] = true;
    }
  });
  const bool is_same = std::exchange(work_.prepared_, &tile_) == &tile_;
  bool any = false;
  for (size_t kind = 0; kind < std::size(kinds); ++kind) {
    bool& prepared = work_.prepared_for_[kind];
    prepared = prepared && is_same;
    kinds[kind] = kinds[kind] && !prepared;
    prepared = prepared || kinds[kind];
    any = any || kinds[kind];
  }
  if (!any) return;
  for (int head = 0; head < tile_.kv_heads; ++head) PrepareHead(head, kinds);
}

void TileAttention::PrepareHead(int head, const Kinds& kinds) noexcept {
  const formats::Side& side = layer_.scheme->k;
  const int kv_head = tile_.kv_head + head;
  const float softmax_scale = layer_.attention->softmax_scale * kernels::kLog2E;
  const kernels::KeyKernel& unquantized = UnquantizedKeyKernel(kernels_, layer_.scheme->unquantized_format->code);
  const float static_scale =
      side.format->scaling.per_head ? layer_.scales->k.scale[static_cast<size_t>(kv_head)] : 1.0f;
  formats::RowTransform transform = formats::TransformOf(side, layer_.scales->k, kv_head, head_dim_);
  const float* mean = std::exchange(transform.mean, nullptr);
  const bool rotated = std::exchange(transform.hadamard, false);
  transform.key_matrix = transform.query_matrix;
  transform.multiply = kernels_.multiply;
  alignas(64) float transformed[kMaxHeadDim];
  float outlier_values[KvScheme::kMaxOutliers];
  for (int of_head = 0; of_head < HeadRows(); ++of_head) {
    const int row = head * HeadRows() + of_head;
    const float* query = reads_.QueryOf(head, of_head / group_, of_head % group_);
    work_.bias_[row] = 0;
    if (mean) {
      double dot = 0;
      for (int c = 0; c < head_dim_; ++c) dot += double{query[c]} * double{mean[c]};
      work_.bias_[row] = static_cast<float>(dot * double{softmax_scale});
    }
    const float* x = query;
    if (!transform.outliers.empty() || side.query || transform.padding != 0) {
      transform.Forward(query, transformed, outlier_values);
      x = transformed;
    }
    if (rotated) {
      kernels_.transform(x, key_dim_, transformed);
      x = transformed;
    }
    for (size_t kind = 0; kind < std::size(kinds); ++kind) {
      if (!kinds[kind]) continue;
      const CellSide& keys = layer_.records[kind].cells.k;
      const int block = formats::BlockChannels(keys.scaling, key_dim_);
      const float scale = keys.scaling.per_head ? softmax_scale * static_scale : softmax_scale;
      uint8_t* prepared = work_.queries_[kind] + row * work_.query_stride_;
      work_.row_scale_[kind][row] = passes_[kind]->key_kernel->prepare(x, key_dim_, block, prepared) * scale;
    }
    if (const int unquantized_dim = layer_.Cells(PageKind::kQuantized).unquantized.head_dim; unquantized_dim != 0) {
      uint8_t* prepared = work_.queries_[TileWorkspace::kUnquantized] + row * work_.query_stride_;
      const float* channels = layer_.scheme->SharesCell() ? query + head_dim_ : outlier_values;
      work_.row_scale_[TileWorkspace::kUnquantized][row] =
          unquantized.prepare(channels, unquantized_dim, 0, prepared) * softmax_scale;
    }
  }
}

template <class AfterHead>
void TileAttention::AttendSplit(int64_t split, AfterHead after_head) noexcept {
  std::fill_n(work_.split_state_, Rows(), kEmptyState);
  std::memset(work_.split_out_, 0, sizeof(float) * static_cast<size_t>(Rows()) * static_cast<size_t>(value_dim_));
  const SplitPages pages = reads_.PagesOf(split);
  for (int64_t page = pages.first; page < pages.end; page += pages.step) {
    int tokens = tile_.tokens;  // tokens that still see the page
    if (!visibility_.IsFull()) {
      const int64_t last_query = visibility_.LastQuery((page + 1) * page_size_ - 1);
      tokens = static_cast<int>(std::min<int64_t>(tokens, last_query + 1 - tile_.first));
    }
    for (int head = 0; head < tile_.kv_heads; ++head) {
      AttendPage(page, head, tokens);
      if (page + pages.step >= pages.end) after_head(head);
      reads_.Advance();
    }
  }
}

// Transposes a page of latents from K's order (channels contiguous) to V's (tokens contiguous), once for all rows of
// the tile.
void TileAttention::TransposeLatents(int64_t page, const PageView& view, int tokens) noexcept {
  const CellSide& latents = view.cells->k;
  const int64_t seen = layer_.gathered != nullptr
                           ? layer_.gathered->TokensOf(static_cast<int32_t>(page))
                           : std::min<int64_t>(page_size_, tile_.first + tokens - page * page_size_);
  const int bits = formats::CodeBits(latents.code);
  kernels_.transpose({.keys = view.record + latents.codes,
                      .row_bytes = int64_t{latents.head_dim} * bits / 8,
                      .element_bytes = std::max(8, bits) / 8,
                      .groups = static_cast<int>(CeilDiv(seen, 16)),
                      .values = work_.values_});
}

// Points the passes at the cells of the page being read.
TileAttention::Passes& TileAttention::BindPage(int64_t page, const PageView& view) noexcept {
  const PageCells& cells = *view.cells;
  Passes& passes = *passes_[cache::KindIndex(view.kind)];
  cells.k.MoveTo(view.record, passes.keys.cell);
  cells.v.MoveTo(view.record, passes.values.cell);
  if (passes.unquantized_kernel != nullptr) cells.unquantized.MoveTo(view.record, passes.unquantized.cell);
  if (shares_cell_) passes.values.cell.codes = work_.values_;
  if (view.kind == PageKind::kQuantized) {
    if (has_bit_allocation_) passes.keys.allocation = layer_.scales->k.query->Allocation(view.kv_head);
    if (value_scales_ != nullptr) passes.values.scale = passes.softmax.value_scale = value_scales_[view.kv_head];
  }
  reads_.SetPrefetches(page, passes.keys.prefetch, passes.softmax.prefetch, passes.values.prefetch);
  return passes;
}

void TileAttention::AttendPage(int64_t page, int head, int tokens) noexcept {
  const PageView& view = reads_.Current();
  if (shares_cell_) TransposeLatents(page, view, tokens);
  Passes& passes = BindPage(page, view);
  const int64_t start = page * page_size_;
  const auto begin_of = [&](int token) {
    return static_cast<int>(std::max<int64_t>(0, visibility_.First(tile_.first + token) - start));
  };
  const auto end_of = [&](int token) {
    if (layer_.gathered != nullptr) return layer_.gathered->TokensOf(static_cast<int32_t>(page));
    const int64_t last = visibility_.Last(tile_.first + token, tile_.last_key + 1);
    return static_cast<int>(std::min<int64_t>(page_size_, last + 1 - start));
  };
  // Processes rows that see the same slots together; tokens differ only in their own page and at the window's edges,
  // where the first ones may not see the page yet.
  for (int token = 0; token < tokens;) {
    const int begin = begin_of(token), end = end_of(token);
    int same = token + 1;
    while (same < tokens && begin_of(same) == begin && end_of(same) == end) ++same;
    for (int row = token * group_; begin < end && row < same * group_; row += kPassRows) {
      const int rows = std::min(kPassRows, same * group_ - row);
      WorkspaceUse workspace_use = row == token * group_ ? WorkspaceUse::kFill : WorkspaceUse::kReuse;
      if (workspace_use == WorkspaceUse::kFill && row + rows == same * group_) workspace_use = WorkspaceUse::kNone;
      AttendRows(passes, begin, end, head * HeadRows() + row, rows, workspace_use);
      passes.keys.prefetch = passes.softmax.prefetch = passes.values.prefetch = {};  // one pass prefetches
    }
    token = same;
  }
}

// Computes the QK scores of `rows` rows from first_row on, for tokens [0, 16 * groups) of the page.
void TileAttention::ScoreRows(Passes& passes, int groups, int first_row, int rows) noexcept {
  const auto score = [&](const kernels::KeyKernel& kernel, kernels::KeyPass& pass, size_t which) {
    pass.groups = groups;
    pass.rows = rows;
    pass.query = work_.queries_[which] + first_row * work_.query_stride_;
    pass.row_scale = work_.row_scale_[which] + first_row;
    kernel.score(pass);
  };
  score(*passes.key_kernel, passes.keys, passes.queries);
  if (passes.unquantized_kernel == nullptr) return;
  score(*passes.unquantized_kernel, passes.unquantized, TileWorkspace::kUnquantized);
  for (int row = 0; row < rows; ++row) {
    float* scores = work_.scores_ + row * kMaxPageTokens;
    const float* more = work_.unquantized_scores_ + row * kMaxPageTokens;
    for (int t = 0; t < 16 * groups; ++t) scores[t] += more[t];
  }
}

void TileAttention::AttendRows(Passes& passes, int begin, int end, int first_row, int rows,
                               WorkspaceUse workspace_use) noexcept {
  passes.keys.workspace_use = workspace_use;
  ScoreRows(passes, static_cast<int>(CeilDiv(end, 16)), first_row, rows);
  kernels::ValuePass& values = passes.values;
  values.begin = begin;
  values.end = end;
  values.rows = rows;
  values.out = work_.split_out_ + int64_t{first_row} * value_dim_;
  values.workspace_use = workspace_use;
  if (passes.value_kernel->load != nullptr) passes.value_kernel->load(values);
  kernels::SoftmaxPass& softmax = passes.softmax;
  softmax.begin = begin;
  softmax.end = end;
  softmax.rows = rows;
  softmax.bias = has_bias_ ? work_.bias_ + first_row : nullptr;
  softmax.state = work_.split_state_ + first_row;
  passes.softmax_kernel(softmax);
  passes.value_kernel->accumulate(values);
}

void TileAttention::Finish() noexcept {
  reads_.Begin();
  PrepareQueries();
  if (layer_.classes.of > 1) return FinishClasses();
  if (last_split_ - first_split_ == 1) {  // nothing to combine
    AttendSplit(first_split_, [this](int head) {
      for (int row = head * HeadRows(); row < (head + 1) * HeadRows(); ++row) {
        WriteRow(row, work_.split_state_[row], work_.split_out_ + int64_t{row} * value_dim_);
      }
    });
    return;
  }
  SoftmaxState* totals = work_.total_state_[0];
  std::fill_n(totals, Rows(), kEmptyState);
  for (int64_t split = first_split_; split < last_split_; ++split) {
    AttendSplit(split, [this, split, totals](int head) {
      for (int row = head * HeadRows(); row < (head + 1) * HeadRows(); ++row) {
        float* total = work_.total_out_[0] + int64_t{row} * value_dim_;
        kernels_.combine(totals[row], total, work_.split_state_[row], work_.split_out_ + int64_t{row} * value_dim_,
                         value_dim_);
        if (split + 1 == last_split_) WriteRow(row, totals[row], total);
      }
    });
  }
}

// The order of CombineSplits, for all rows of a split at once. Exchanging buffers is combining with an empty result.
void TileAttention::FinishClasses() noexcept {
  bool filled[kTreeDepth] = {};
  const auto combine = [this](SoftmaxState*& states, float*& out, SoftmaxState*& from, float*& from_out, bool& fills) {
    if (!std::exchange(fills, true)) {
      std::swap(states, from);
      std::swap(out, from_out);
      return;
    }
    for (int row = 0; row < Rows(); ++row) {
      const int64_t first = int64_t{row} * value_dim_;
      kernels_.combine(states[row], out + first, from[row], from_out + first, value_dim_);
    }
  };
  const PageClasses& classes = layer_.classes;
  ReduceTree(
      classes.first, classes.step, classes.of, 0,
      [&](int of_class, int depth) {
        filled[depth] = false;
        const int64_t index = (of_class - classes.first) / classes.step;
        for (int64_t split = first_split_ + index; split < last_split_; split += classes.Own()) {
          if (reads_.PagesOf(split).IsEmpty()) continue;
          AttendSplit(split, [](int) {});
          combine(work_.total_state_[depth], work_.total_out_[depth], work_.split_state_, work_.split_out_,
                  filled[depth]);
        }
      },
      [&](int depth) {
        if (!filled[depth + 1]) return;
        combine(work_.total_state_[depth], work_.total_out_[depth], work_.total_state_[depth + 1],
                work_.total_out_[depth + 1], filled[depth]);
      });
  for (int row = 0; row < Rows(); ++row) {
    WriteRow(row, work_.total_state_[0][row], work_.total_out_[0] + int64_t{row} * value_dim_);
  }
}

void TileAttention::StoreSplitResult(SoftmaxState* states, float* out) noexcept {
  reads_.Begin();
  PrepareQueries();
  AttendSplit(first_split_, [](int) {});
  std::copy_n(work_.split_state_, Rows(), states);
  std::memcpy(out, work_.split_out_, sizeof(float) * static_cast<size_t>(Rows()) * static_cast<size_t>(value_dim_));
}

void TileAttention::CombineSplits(int head, const SoftmaxState* states, const float* split_out) noexcept {
  for (int row = head * HeadRows(); row < (head + 1) * HeadRows(); ++row) {
    SoftmaxState totals[kTreeDepth];
    const PageClasses& classes = layer_.classes;
    ReduceTree(
        classes.first, classes.step, classes.of, 0,
        [&](int of_class, int depth) {
          totals[depth] = kEmptyState;
          const int64_t index = (of_class - classes.first) / classes.step;
          for (int64_t split = index; split < last_split_ - first_split_; split += classes.Own()) {
            if (reads_.PagesOf(first_split_ + split).IsEmpty()) continue;
            const int64_t slot = split * Rows() + row;
            kernels_.combine(totals[depth], work_.total_out_[depth], states[slot], split_out + slot * value_dim_,
                             value_dim_);
          }
        },
        [&](int depth) {
          kernels_.combine(totals[depth], work_.total_out_[depth], totals[depth + 1], work_.total_out_[depth + 1],
                           value_dim_);
        });
    WriteRow(row, totals[0], work_.total_out_[0]);
  }
}

void WriteResult(const AttentionKernels& kernels, const formats::LayerScheme& layer, const SoftmaxState& state,
                 const float* sums, float* result) noexcept {
  const int channels = layer.shape.head_dim, of_cell = layer.v.shape.head_dim;
  if (!layer.v.hadamard) return kernels.normalize(state, sums, channels, result);
  alignas(64) float rotated[kMaxHeadDim];  // temporary: `result` is not in L1, write it once
  kernels.normalize(state, sums, of_cell, rotated);
  if (of_cell == channels) return kernels.transform(rotated, channels, result);
  kernels.transform(rotated, of_cell, rotated);
  std::copy_n(rotated, channels, result);
}

void TileAttention::WriteRow(int row, SoftmaxState state, const float* sums) noexcept {
  const int of_head = row % HeadRows();
  if (const PartialResults* partial = reads_.rows().partial; partial != nullptr) {
    const int head = (tile_.kv_head + row / HeadRows()) * group_ + of_head % group_;
    return partial->Store(reads_.rows().partial_row + of_head / group_, head, state, sums);
  }
  if (const std::vector<float>& sinks = layer_.attention->sinks; !sinks.empty()) {
    const int head = (tile_.kv_head + row / HeadRows()) * group_ + of_head % group_;
    AddSink(sinks[static_cast<size_t>(head)], state);
  }
  WriteResult(kernels_, *layer_.scheme, state, sums,
              reads_.ResultOf(row / HeadRows(), of_head / group_, of_head % group_));
}

}  // namespace kvanta::attention
