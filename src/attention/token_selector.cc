#include "attention/token_selector.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>

#include "attention/kernels_of_format.h"
#include "attention/tile_attention.h"
#include "base/math.h"

namespace kvanta::attention {
namespace {

using kernels::kMaxHeadDim;
using kernels::kMaxPageTokens;
using kernels::kPassRows;
using kernels::WorkspaceUse;

constexpr size_t kTaskRows = 4;             // rows that share the loads of a page
constexpr int64_t kScoreTasksOfThread = 4;  // at least, as far as they are worth preparing queries for
constexpr int64_t kMinTaskTokens = 512;     // that a task scores
constexpr int64_t kMaxTaskTokens = 8192;
constexpr int64_t kWaveScores = 1 << 22;  // floats
constexpr int kGroup = 16;                // tokens of a group of scores

// A vector of floats: this file is compiled without the optimizations that would make vectors of loops.
using Float4 = float __attribute__((vector_size(16)));

Float4 Load(const float* from) noexcept {
  Float4 values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}

// Integers in the order of floats; zeros of both signs are equal, NaN is as -infinity.
using Int4 = int32_t __attribute__((vector_size(16)));
Int4 OrdersOf(Float4 scores) noexcept {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  constexpr Float4 kLeastOfAll = {kLeast, kLeast, kLeast, kLeast};
  scores = scores == scores ? scores : kLeastOfAll;  // NOLINT(misc-redundant-expression): false for NaN
  scores += 0.0F;                                    // -0 + 0 is 0
  Int4 bits;
  std::memcpy(&bits, &scores, sizeof(bits));
  return bits ^ ((bits >> 31) & std::numeric_limits<int32_t>::max());
}

// Calls visit(first, orders of kGroup scores from it on); past the last score, they are those of -infinity.
template <class Visit>
void ForOrders(std::span<const float> scores, Visit visit) noexcept {
  Int4 orders[kGroup / 4];
  size_t first = 0;
  for (; first + kGroup <= scores.size(); first += kGroup) {
    for (size_t i = 0; i < std::size(orders); ++i) orders[i] = OrdersOf(Load(scores.data() + first + 4 * i));
    visit(first, orders);
  }
  if (first == scores.size()) return;
  float rest[kGroup];
  std::ranges::fill(std::ranges::copy(scores.subspan(first), rest).out, std::end(rest),
                    -std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < std::size(orders); ++i) orders[i] = OrdersOf(Load(rest + 4 * i));
  visit(first, orders);
}

// True if a comparison is true of any of kGroup orders.
bool Any(const Int4 (&orders)[kGroup / 4], auto compare) noexcept {
  const Int4 any = compare(orders[0]) | compare(orders[1]) | compare(orders[2]) | compare(orders[3]);
  int64_t halves[2];
  std::memcpy(halves, &any, sizeof(halves));
  return (halves[0] | halves[1]) != 0;
}

}  // namespace

std::span<const int32_t> ChosenTokens::OfRow(int64_t row) const noexcept {
  const auto found = std::ranges::lower_bound(rows, row, {}, &SparseRow::row);
  if (found == rows.end() || found->row != row) return {};
  return Of(static_cast<size_t>(found - rows.begin()));
}

std::vector<SequenceRows> DenseRows(const Batch& batch, int top_k) {
  std::vector<SequenceRows> dense = batch.sequences;
  for (SequenceRows& sequence : dense) {
    const int64_t left = std::clamp<int64_t>(top_k - sequence.span.start, 0, sequence.span.tokens);
    sequence.span.tokens = static_cast<int>(left);
  }
  return dense;
}

// The threshold is found by its leading bits first, whose numbers of scores are counted. Few scores share them, or are
// chosen: groups without any are passed over.
void ChooseLargest(std::span<const float> scores, int count, int32_t* scratch, int32_t* positions) noexcept {
  constexpr int kBinShift = 20, kBins = 1 << (32 - kBinShift), kFirst = -kBins / 2;
  constexpr size_t kTables = 2;  // neighbours often have the same bin, whose increments would wait for one another
  std::array<std::array<int32_t, kBins>, kTables> tables{};
  ForOrders(scores, [&](size_t, const Int4* orders) {
    for (size_t i = 0; i < kGroup / 4; ++i) {
      const Int4 of_bins = (orders[i] >> kBinShift) - kFirst;
      for (size_t lane = 0; lane < 4; ++lane) ++tables[lane % kTables][static_cast<size_t>(of_bins[lane])];
    }
  });
  // The bin of the smallest score that is chosen, and the number of chosen ones in it. What ForOrders adds is in the
  // bin of -infinity, from which no more are chosen than there are scores.
  int bin = kBins - 1;
  int64_t left = count;
  const auto in_bin = [&] { return tables[0][static_cast<size_t>(bin)] + tables[1][static_cast<size_t>(bin)]; };
  for (; in_bin() < left; --bin) left -= in_bin();
  int32_t* end = scratch;
  const auto is_in_bin = [of_bin = bin + kFirst](auto order) { return (order >> kBinShift) == of_bin; };
  ForOrders(scores, [&](size_t first, const Int4(&orders)[kGroup / 4]) {
    if (!Any(orders, is_in_bin)) return;
    for (size_t i = 0; i < kGroup && first + i < scores.size(); ++i) {
      const int32_t order = orders[i / 4][i % 4];
      if (is_in_bin(order)) *end++ = order;
    }
  });
  std::nth_element(scratch, scratch + left - 1, end, std::greater<>());
  const int32_t threshold = scratch[left - 1];
  // Tokens of exactly that score that are left to choose.
  int64_t equal = left - std::count_if(scratch, scratch + left, [&](int32_t order) { return order > threshold; });
  ForOrders(scores, [&](size_t first, const Int4(&orders)[kGroup / 4]) {
    if (!Any(orders, [&](Int4 order) { return order >= threshold; })) return;
    for (size_t i = 0; i < kGroup && first + i < scores.size(); ++i) {
      const int32_t order = orders[i / 4][i % 4];
      if (order < threshold || (order == threshold && equal-- <= 0)) continue;
      *positions++ = static_cast<int32_t>(first + i);
    }
  });
}

TokenSelector::TokenSelector(Device& device, const std::vector<LayerView>& layers, int top_k,
                             const kernels::AttentionKernels& kernels, ThreadPool& threads,
                             parallel::Communicator* ranks)
    : layers_(layers),
      top_k_(top_k),
      kernels_(kernels),
      threads_(threads),
      ranks_(ranks),
      workspaces_(static_cast<size_t>(threads.Threads())) {
  for (const LayerView& layer : layers) {
    if (!layer.scheme->keys_only) continue;
    const CellSide& keys = layer.Cells(cache::PageKind::kQuantized).k;
    page_size_ = layer.scheme->shape.tokens;
    row_tokens_ = layer.scheme->row_tokens;
    heads_ = std::max(heads_, layer.attention->heads);
    const int head_dim = layer.scheme->k.shape.head_dim;
    query_stride_ = std::max({query_stride_, KeyKernelOf(kernels, keys.code, keys.scaling).query_bytes(head_dim),
                              kernels.exact_keys.query_bytes(head_dim)});
  }
  const int64_t rows = int64_t{heads_} * static_cast<int64_t>(kTaskRows);
  const int64_t query_bytes = rows * query_stride_,
                scale_bytes = RoundUp(rows * int64_t{sizeof(float)}, kWorkspaceAlignment),
                score_bytes = int64_t{sizeof(float)} * kPassRows * kMaxPageTokens;
  for (Workspace& workspace : workspaces_) {
    workspace.memory =
        device.Allocate(static_cast<size_t>(2 * (query_bytes + scale_bytes) + score_bytes + kernels::kWorkspaceBytes));
    uint8_t* next = workspace.memory.data();
    for (int kind = 0; kind < 2; ++kind) {
      workspace.queries[kind] = next;
      workspace.row_scale[kind] = reinterpret_cast<float*>(next + query_bytes);
      next += query_bytes + scale_bytes;
    }
    workspace.scores = reinterpret_cast<float*>(next);
    workspace.kernel = next + score_bytes;
  }
}

void TokenSelector::MakePlan(const Batch& batch, ChosenTokens& chosen) const {
  chosen.top_k = top_k_;
  chosen.rows.clear();
  chosen.tasks.clear();
  chosen.waves.clear();
  int64_t longest = 0, pages_of_rows = 0;
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceRows& sequence = batch.sequences[s];
    const int64_t first = (int64_t{top_k_} + 1) * row_tokens_ - 1;  // sees more than top_k
    for (int64_t position = std::max(sequence.span.start, first); position < sequence.End(); ++position) {
      const int64_t seen = (position + 1) / row_tokens_;
      chosen.rows.push_back(
          {.sequence = s, .row = sequence.first_row + position - sequence.span.start, .position = seen - 1});
      longest = std::max(longest, seen);
      pages_of_rows += CeilDiv(seen, int64_t{page_size_});
    }
  }
  if (chosen.rows.empty()) return;
  chosen.score_stride = RoundUp(longest, page_size_);
  // Ranks, which may have other numbers of threads, have the same waves.
  const size_t min_rows = ranks_ == nullptr ? kTaskRows * workspaces_.size() : kTaskRows;
  const auto wave_rows =
      static_cast<size_t>(std::max(kWaveScores / chosen.score_stride, static_cast<int64_t>(min_rows)));
  const int64_t pages_of_all = std::max(pages_of_rows / static_cast<int64_t>(kTaskRows), longest / page_size_);
  const int64_t pages_of_task =
      std::clamp(pages_of_all / (kScoreTasksOfThread * std::ssize(workspaces_)),
                 std::max<int64_t>(1, kMinTaskTokens / page_size_), kMaxTaskTokens / page_size_);
  for (size_t first = 0; first < chosen.rows.size();) {
    const SparseRow& row = chosen.rows[first];
    size_t last = first + 1;
    while (last < chosen.rows.size() && last < first + kTaskRows && chosen.rows[last].sequence == row.sequence &&
           chosen.rows[last].position / page_size_ == row.position / page_size_) {
      ++last;
    }
    if (chosen.waves.empty() || last - chosen.waves.back().first_row > wave_rows) {
      chosen.waves.push_back({.first_row = first, .first_task = chosen.tasks.size()});
    }
    const int64_t pages = chosen.rows[last - 1].position / page_size_ + 1;
    for (int64_t page = 0; page < pages; page += pages_of_task) {
      chosen.tasks.push_back({.first_row = first,
                              .last_row = last,
                              .first_page = page,
                              .last_page = std::min(pages, page + pages_of_task)});
    }
    chosen.waves.back().last_row = last;
    chosen.waves.back().last_task = chosen.tasks.size();
    first = last;
  }
  const size_t max_rows = std::min(wave_rows, chosen.rows.size()), stride = static_cast<size_t>(chosen.score_stride);
  if (chosen.scores.size() < max_rows * stride) chosen.scores.resize(max_rows * stride);
  if (ranks_ != nullptr) {
    const int64_t pages = CeilDiv(chosen.score_stride / page_size_, ranks_->Size()) * ranks_->Size();
    const size_t floats = max_rows * static_cast<size_t>(pages * page_size_);
    if (chosen.received.size() < floats) chosen.received.resize(floats);
  }
  if (chosen.orders.size() < workspaces_.size() * stride) chosen.orders.resize(workspaces_.size() * stride);
  const size_t positions = chosen.rows.size() * static_cast<size_t>(top_k_);
  if (chosen.positions.size() < positions) chosen.positions.resize(positions);
}

void TokenSelector::Select(const Batch& batch, int layer, const Queries& queries, ChosenTokens& chosen) noexcept {
  const LayerView& view = layers_[static_cast<size_t>(layer)];
  for (const ScoreWave& wave : chosen.waves) {
    const auto scores_of = [&](size_t row) {
      return chosen.scores.data() + (row - wave.first_row) * static_cast<size_t>(chosen.score_stride);
    };
    auto score = [&](int64_t index, int worker) {
      const kernels::KernelScope scope(kernels_);
      const ScoreTask& task = chosen.tasks[wave.first_task + static_cast<size_t>(index)];
      const SequenceRows& sequence = batch.sequences[chosen.rows[task.first_row].sequence];
      Score(view, sequence.span.pages[view.scheme->group], task, queries, chosen, scores_of(task.first_row),
            workspaces_[static_cast<size_t>(worker)]);
    };
    threads_.ForEach(static_cast<int64_t>(wave.last_task - wave.first_task), score);
    if (ranks_ != nullptr) GatherScores(wave, chosen);
    auto choose = [&](int64_t index, int worker) {
      const size_t row = wave.first_row + static_cast<size_t>(index);
      ChooseLargest({scores_of(row), static_cast<size_t>(chosen.rows[row].position + 1)}, top_k_,
                    chosen.orders.data() + static_cast<size_t>(worker) * static_cast<size_t>(chosen.score_stride),
                    chosen.positions.data() + row * static_cast<size_t>(top_k_));
    };
    threads_.ForEach(static_cast<int64_t>(wave.last_row - wave.first_row), choose);
  }
}

void TokenSelector::GatherScores(const ScoreWave& wave, ChosenTokens& chosen) const noexcept {
  const int64_t rows = static_cast<int64_t>(wave.last_row - wave.first_row), pages = chosen.score_stride / page_size_;
  const int ranks = ranks_->Size();
  std::array<parallel::Destination, parallel::kMaxRanks> to;
  float* next = chosen.received.data();
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t floats = rows * CeilDiv(std::max<int64_t>(0, pages - rank), ranks) * page_size_;
    to[static_cast<size_t>(rank)] = {.first = reinterpret_cast<uint8_t*>(next),
                                     .rows = 1,
                                     .row_bytes = floats * static_cast<int64_t>(sizeof(float))};
    next += floats;
  }
  // Calls copy(scores of a page, its place among those of its rank).
  const auto for_pages = [&](int rank, auto copy) {
    auto* place = reinterpret_cast<float*>(to[static_cast<size_t>(rank)].first);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t page = rank; page < pages; page += ranks, place += page_size_) {
        copy(chosen.scores.data() + row * chosen.score_stride + page * page_size_, place);
      }
    }
  };
  for_pages(ranks_->Rank(), [&](const float* own, float* place) { std::copy_n(own, page_size_, place); });
  ranks_->AllGather(to[static_cast<size_t>(ranks_->Rank())].first, std::span(to).first(static_cast<size_t>(ranks)));
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == ranks_->Rank()) continue;
    for_pages(rank, [&](float* scores, const float* place) { std::copy_n(place, page_size_, scores); });
  }
}

void TokenSelector::PrepareQueries(const LayerView& layer, const ScoreTask& task, const Queries& queries,
                                   const ChosenTokens& chosen, Workspace& workspace) const noexcept {
  const int heads = layer.attention->heads, head_dim = layer.scheme->shape.head_dim;
  const int key_dim = layer.scheme->k.shape.head_dim;  // of cells, which may have padding
  const int64_t own_page = chosen.rows[task.first_row].position / page_size_;
  bool reads[2] = {};  // quantized records, exact ones
  for (int64_t page = task.first_page; page < task.last_page; ++page)
    reads[layer.rule.Kind(own_page, page) == cache::PageKind::kExact] = true;
  const CellSide& keys = layer.Cells(cache::PageKind::kQuantized).k;
  const kernels::KeyKernel* key_kernels[2] = {&KeyKernelOf(kernels_, keys.code, keys.scaling), &kernels_.exact_keys};
  const int blocks[2] = {formats::BlockChannels(keys.scaling, key_dim), 0};
  alignas(64) float padded[kMaxHeadDim], rotated[kMaxHeadDim];
  for (size_t row = task.first_row; row < task.last_row; ++row) {
    for (int head = 0; head < heads; ++head) {
      const float* query = queries.q + chosen.rows[row].row * queries.q_stride + int64_t{head} * head_dim;
      if (key_dim != head_dim) {
        std::fill(std::copy_n(query, head_dim, padded), padded + key_dim, 0.0F);
        query = padded;
      }
      if (layer.scheme->k.hadamard) {
        kernels_.transform(query, key_dim, rotated);
        query = rotated;
      }
      const int64_t at = static_cast<int64_t>(row - task.first_row) * heads + head;
      for (int kind = 0; kind < 2; ++kind) {
        if (!reads[kind]) continue;
        workspace.row_scale[kind][at] =
            key_kernels[kind]->prepare(query, key_dim, blocks[kind], workspace.queries[kind] + at * query_stride_);
      }
    }
  }
}

// scores: [task's rows][score_stride].
void TokenSelector::Score(const LayerView& layer, const cache::PageRef* table, const ScoreTask& task,
                          const Queries& queries, const ChosenTokens& chosen, float* scores,
                          Workspace& workspace) const noexcept {
  PrepareQueries(layer, task, queries, chosen, workspace);
  const int heads = layer.attention->heads;
  const int64_t last_position = chosen.rows[task.last_row - 1].position, own_page = last_position / page_size_;
  for (int64_t page = task.first_page; page < task.last_page; ++page) {
    if (!HasPage(page)) continue;
    const PageView view = layer.View(own_page, page, table[page], 0);
    const CellSide& side = view.cells->k;
    const bool exact = view.kind == cache::PageKind::kExact;
    const kernels::KeyKernel& kernel = exact ? kernels_.exact_keys : KeyKernelOf(kernels_, side.code, side.scaling);
    kernels::KeyPass pass{.cell = side.View(),
                          .groups = static_cast<int>(
                              CeilDiv(std::min<int64_t>(page_size_, last_position + 1 - page * page_size_), kGroup)),
                          .query_stride = query_stride_,
                          .scores = workspace.scores,
                          .workspace = workspace.kernel,
                          .workspace_use = WorkspaceUse::kFill};
    side.MoveTo(view.record, pass.cell);
    for (size_t row = task.first_row; row < task.last_row; ++row) {
      const auto of_task = static_cast<int64_t>(row - task.first_row);
      float* out = scores + of_task * chosen.score_stride + page * page_size_;
      std::fill_n(out, pass.groups * kGroup, 0.0F);
      for (int head = 0; head < heads; head += kPassRows) {
        const int64_t at = of_task * heads + head;
        pass.rows = std::min(kPassRows, heads - head);
        pass.query = workspace.queries[exact] + at * query_stride_;
        pass.row_scale = workspace.row_scale[exact] + at;
        kernel.score(pass);
        pass.workspace_use = WorkspaceUse::kReuse;
        kernels_.add_weighted_scores(workspace.scores, queries.weights + chosen.rows[row].row * heads + head, pass.rows,
                                     pass.groups, out);
      }
    }
  }
}

}  // namespace kvanta::attention
