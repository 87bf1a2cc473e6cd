#include "attention/context_parallel.h"

#include <fmt/format.h>

#include <algorithm>

#include "attention/tile_attention.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using kernels::SoftmaxState;

// Memory of a wave's queries, results and received results, about. Results of 128 heads take half a megabyte a row.
constexpr int64_t kWaveBytes = int64_t{16} << 20;

PartialResults ResultsOf(int64_t rows, int64_t heads, int64_t width) {
  return {.rows = rows, .heads = heads, .width = width};
}

}  // namespace

ContextParallel::ContextParallel(parallel::Communicator& ranks, const std::vector<LayerView>& layers,
                                 const kernels::AttentionKernels& kernels, ThreadPool& threads)
    : ranks_(ranks), kernels_(kernels), threads_(threads) {
  for (const LayerView& layer : layers) {
    const int64_t heads = layer.attention->heads;
    heads_ = std::max(heads_, heads);
    query_floats_ = std::max(query_floats_, heads * layer.attention->KeyDim());
    result_floats_ = std::max<int64_t>(result_floats_, layer.scheme->v.shape.head_dim);
  }
  const int64_t row_bytes = (query_floats_ + 2 * heads_ * result_floats_) * static_cast<int64_t>(sizeof(float));
  wave_rows_ = std::max<int64_t>(1, kWaveBytes / row_bytes);
}

void ContextParallel::MakePlan(const Batch& batch, std::span<const WorkShape> shapes, int page_size,
                               ContextPlan& plan) const {
  plan.waves.resize(static_cast<size_t>(CeilDiv(batch.rows, wave_rows_)));
  for (size_t i = 0; i < plan.waves.size(); ++i) {
    ContextWave& wave = plan.waves[i];
    wave.first_row = static_cast<int64_t>(i) * wave_rows_;
    wave.batch.rows = std::min(wave_rows_, batch.rows - wave.first_row);
    wave.batch.sequences.clear();
    const int64_t end = wave.first_row + wave.batch.rows;
    for (SequenceRows sequence : batch.sequences) {
      const int64_t first = std::max(wave.first_row, sequence.first_row);
      const int64_t last = std::min(end, sequence.first_row + sequence.span.tokens);
      if (first >= last) continue;
      sequence.span.start += first - sequence.first_row;
      sequence.span.tokens = static_cast<int>(last - first);
      sequence.first_row = first - wave.first_row;
      wave.batch.sequences.push_back(sequence);
    }
    wave.lists.resize(shapes.size());
    for (size_t shape = 0; shape < shapes.size(); ++shape) {
      MakeWorkList(shapes[shape], wave.batch, page_size, threads_.Threads(), wave.lists[shape]);
    }
  }
  const int64_t rows = std::min(wave_rows_, batch.rows);
  const auto grow = [](auto& values, int64_t count) {
    if (std::ssize(values) < count) values.resize(static_cast<size_t>(count));
  };
  const int64_t result_bytes = ranks_.Size() * ResultsOf(rows, heads_ / ranks_.Size(), result_floats_).BlockBytes();
  grow(plan.queries, rows * query_floats_);
  grow(plan.results, result_bytes);
  grow(plan.received, result_bytes);
}

void ContextParallel::GatherQueries(const LayerView& layer, const float* own, const PartialResults& partial,
                                    ContextPlan& plan) noexcept {
  const int64_t width = int64_t{layer.attention->heads} * layer.attention->KeyDim();
  ranks_.AllGatherColumns(own, partial.rows, ranks_.PartitionOf(width), plan.queries.data());
  // Rows that see no page of this rank keep these.
  for (int rank = 0; rank < ranks_.Size(); ++rank) {
    std::fill_n(partial.States(rank), partial.rows * partial.heads, kEmptyState);
  }
}

void ContextParallel::Merge(const LayerView& layer, const PartialResults& partial, ContextPlan& plan,
                            float* out) noexcept {
  ranks_.AllToAll(partial.blocks, partial.BlockBytes(), plan.received.data());
  PartialResults received = partial;
  received.blocks = plan.received.data();
  const auto merge = [&](int64_t index) {
    SoftmaxState states[kTreeDepth];
    alignas(64) float sums[kTreeDepth][kernels::kMaxHeadDim];
    ReduceTree(
        0, 1, ranks_.Size(), 0,
        [&](int rank, int depth) {
          const PartialResults& from = rank == ranks_.Rank() ? partial : received;
          states[depth] = kEmptyState;
          kernels_.combine(states[depth], sums[depth], from.States(rank)[index],
                           from.Sums(rank) + index * partial.width, static_cast<int>(partial.width));
        },
        [&](int depth) {
          kernels_.combine(states[depth], sums[depth], states[depth + 1], sums[depth + 1],
                           static_cast<int>(partial.width));
        });
    WriteResult(kernels_, *layer.scheme, states[0], sums[0], out + index * layer.attention->head_dim);
  };
  constexpr int64_t kOfTask = 8;
  const int64_t all = partial.rows * partial.heads;
  auto merge_some = [&](int64_t task, int /*worker*/) {
    for (int64_t index = task * kOfTask; index < std::min(all, (task + 1) * kOfTask); ++index) merge(index);
  };
  threads_.ForEach(CeilDiv(all, kOfTask), merge_some);
}

void CheckContextParallel(const cache::PagePool& pool, const BackendConfig& config) {
  const int ranks = config.ranks == nullptr ? 1 : config.ranks->Size();
  if (ranks != pool.Ranks() || kLatentClasses % ranks != 0) {
    throw InputError(fmt::format("attention of {} ranks to pages of {}; both are 1, 2 or 4", ranks, pool.Ranks()));
  }
  if (ranks == 1) return;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const formats::LayerScheme& scheme = pool.Layout().layers[i];
    const bool is_of_latents = DividesPages(scheme, config.layers[i]) && config.layers[i].sinks.empty();
    const bool is_of_entries = scheme.shared_kv || scheme.row_tokens != 1 || scheme.IsRecurrent();
    if ((is_of_latents || is_of_entries) && scheme.ages.empty()) continue;
    throw InputError(
        fmt::format("layer {}: pages are divided among ranks of dense attention to latents, without sinks, and of "
                    "compressed entries; without ages",
                    i));
  }
}

}  // namespace kvanta::attention
