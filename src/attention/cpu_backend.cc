#include "attention/cpu_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <optional>
#include <utility>

#include "attention/cache_writer.h"
#include "attention/compressed_attention.h"
#include "attention/context_parallel.h"
#include "attention/gathered_attention.h"
#include "attention/tile_attention.h"
#include "attention/token_selector.h"
#include "attention/work_list.h"
#include "kernels/cpu/select.h"
#include "kernels/ops.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;

// Plan of the CPU backend. Split results are f32 outputs with their softmax states.
class CpuPlan final : public Plan {
 public:
  Batch batch;
  Batch dense;                  // of layers with sparse attention: the rows that attend to all they see
  ChosenTokens chosen;          // of the other rows
  std::vector<WorkList> lists;  // one per distinct layer shape
  ContextPlan context;          // with context parallelism, instead of `lists`
  std::vector<SoftmaxState> split_states;
  std::vector<float> split_out;
};

// With context parallelism, a rank attends with the heads of all.
BackendConfig WithAllHeads(const cache::PagePool& pool, BackendConfig config) {
  CheckContextParallel(pool, config);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (DividesPages(pool.Layout().layers[i], config.layers[i])) config.layers[i].heads *= pool.Ranks();
  }
  return config;
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(cache::PagePool& pool, BackendConfig config, std::shared_ptr<ThreadPool> threads,
             const kernels::IsaTable& isa)
      : pool_(pool),
        config_(CheckConfig(WithAllHeads(pool, std::move(config)), pool.Layout(), {"cpu", kernels::kMaxHeadDim})),
        spec_(SpecOf(pool, config_)),
        threads_(std::move(threads)),
        isa_(isa),
        kernels_(*isa.attention),
        writer_(pool, config_, {kernels_.search_trellis, kernels_.search_klt, kernels_.multiply}),
        workspaces_(static_cast<size_t>(threads_->Threads())) {
    int rows = kTileRows;
    bool has_shared_kv = false;
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      const formats::LayerScheme& scheme = pool.Layout().layers[i];
      layers_.emplace_back(scheme, config_.layers[i], config_.scales[i], pool);
      list_of_layer_.push_back(0);
      if (scheme.IsRecurrent() || scheme.keys_only) continue;
      if (scheme.shared_kv) {
        has_shared_kv = true;
        rows = std::max(rows, config_.layers[i].heads);
        continue;
      }
      WorkShape shape = WorkShapeOf(config_.layers[i], scheme);
      shape.classes = layers_.back().classes;
      const auto known = std::find(shapes_.begin(), shapes_.end(), shape);
      list_of_layer_.back() = static_cast<size_t>(known - shapes_.begin());
      if (known == shapes_.end()) shapes_.push_back(shape);
      rows = std::max(rows, shape.Group());
    }
    for (TileWorkspace& workspace : workspaces_) workspace.Reserve(pool.device(), rows, layers_, kernels_);
    if (const int top_k = TopkOf(config_.layers); top_k != 0) {
      selector_.emplace(pool.device(), layers_, top_k, kernels_, *threads_, config_.ranks);
      gathered_.emplace(pool.device(), layers_, top_k, kernels_, *threads_);
    }
    if (has_shared_kv) {
      compressed_.emplace(pool.device(), layers_, pool.Layout().page_size, kernels_, *threads_, config_.ranks);
    } else if (pool.Ranks() > 1) {
      context_.emplace(*config_.ranks, layers_, kernels_, *threads_);
    }
  }

  BackendInfo Info() const override {
    BackendInfo info{.name = fmt::format("cpu-{}", isa_.name), .codes = {}};
    for (int code = 0; code < formats::kElementTypes; ++code)
      info.codes.push_back(static_cast<formats::ElementType>(code));
    return info;
  }

  std::unique_ptr<Plan> MakePlan(const BatchShape& batch, std::unique_ptr<Plan> plan) override {
    auto& cpu_plan = ReuseOrMake<CpuPlan>(plan);
    MakeBatch(batch, pool_, spec_, cpu_plan.batch);
    if (selector_) {
      selector_->MakePlan(cpu_plan.batch, cpu_plan.chosen);
      cpu_plan.dense.sequences = DenseRows(cpu_plan.batch, cpu_plan.chosen.top_k);
    }
    if (compressed_) compressed_->MakePlan(cpu_plan.batch);
    if (context_) {
      context_->MakePlan(cpu_plan.batch, shapes_, pool_.Layout().page_size, cpu_plan.context);
      for (const ContextWave& wave : cpu_plan.context.waves) ReserveSplits(wave.lists, cpu_plan);
      return plan;
    }
    cpu_plan.lists.resize(shapes_.size());
    for (size_t i = 0; i < shapes_.size(); ++i) {
      MakeWorkList(shapes_[i], shapes_[i].is_sparse ? cpu_plan.dense : cpu_plan.batch, pool_.Layout().page_size,
                   threads_->Threads(), cpu_plan.lists[i]);
    }
    ReserveSplits(cpu_plan.lists, cpu_plan);
    return plan;
  }

  void Append(Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    writer_.Write(static_cast<CpuPlan&>(plan).batch, layer, k, v, kv_stride, *threads_);
  }

  void EncodeLevels(int group, const uint8_t* quantized, std::span<uint8_t* const> later) noexcept override {
    writer_.EncodeLevels(group, quantized, later, *threads_);
  }

  void Run(Plan& plan, int layer, const float* q, int64_t q_stride, float* out,
           const kernels::Linear* /*reader*/) noexcept override {
    CpuPlan& cpu_plan = static_cast<CpuPlan&>(plan);
    const LayerView& view = layers_[static_cast<size_t>(layer)];
    if (view.scheme->shared_kv) {
      return compressed_->Run({.batch = cpu_plan.batch, .chosen = cpu_plan.chosen}, layer,
                              {.q = q, .q_stride = q_stride, .out = out}, workspaces_);
    }
    const size_t list = list_of_layer_[static_cast<size_t>(layer)];
    if (context_) {
      assert(q_stride * pool_.Ranks() == int64_t{view.attention->heads} * view.attention->KeyDim());
      return context_->Run(cpu_plan.context, view, q, out, [&](const ContextWave& wave, const QueryRows& rows) {
        Attend(wave.batch, wave.lists[list], view, rows, cpu_plan);
      });
    }
    Attend(cpu_plan.batch, cpu_plan.lists[list], view, {.q = q, .q_stride = q_stride, .out = out}, cpu_plan);
    if (shapes_[list].is_sparse) gathered_->Run(cpu_plan.batch, cpu_plan.chosen, layer, q, q_stride, out, workspaces_);
  }

  void Select(Plan& plan, int layer, const float* q, int64_t q_stride, const float* weights) noexcept override {
    CpuPlan& cpu_plan = static_cast<CpuPlan&>(plan);
    selector_->Select(cpu_plan.batch, layer, {q, q_stride, weights}, cpu_plan.chosen);
  }
  std::span<const int32_t> Selected(const Plan& plan, int64_t row) const noexcept override {
    return static_cast<const CpuPlan&>(plan).chosen.OfRow(row);
  }

  cache::StateStep States(const Plan& plan, int layer) const noexcept override {
    return StatesOf(static_cast<const CpuPlan&>(plan).batch, pool_, layer);
  }

  void AcceptDrafts(Plan& plan, std::span<const int> accepted) const noexcept override {
    attention::AcceptDrafts(accepted, static_cast<CpuPlan&>(plan).batch);
  }

  AppendCounts Counts(int layer) const override { return writer_.Counts(layer); }
  const formats::LayerScales& Scales(int layer) const override { return config_.scales.at(static_cast<size_t>(layer)); }

 private:
  static void ReserveSplits(const std::vector<WorkList>& lists, CpuPlan& plan) {
    for (const WorkList& list : lists) {
      const auto rows = static_cast<size_t>(list.split_rows);
      const size_t floats = rows * static_cast<size_t>(list.shape.head_dim);
      if (plan.split_states.size() < rows) plan.split_states.resize(rows);
      if (plan.split_out.size() < floats) plan.split_out.resize(floats);
    }
  }

  // Attention of the rows of `batch`; all_rows: from its first one on.
  void Attend(const Batch& batch, const WorkList& list, const LayerView& view, const QueryRows& all_rows,
              CpuPlan& cpu_plan) noexcept {
    const int64_t out_stride = int64_t{view.attention->heads} * view.attention->head_dim;
    for (TileWorkspace& workspace : workspaces_) workspace.InvalidateQueries();
    const auto attention_of = [&](const QueryTile& tile, int64_t first_split, int64_t last_split, int worker) {
      const SequenceRows& sequence = batch.sequences[static_cast<size_t>(tile.sequence)];
      const int64_t row = sequence.first_row + tile.first - sequence.span.start;
      QueryRows rows = all_rows;
      rows.q += row * rows.q_stride;
      rows.partial_row = row;
      if (rows.out != nullptr) rows.out += row * out_stride;
      return TileAttention(kernels_, view, tile, first_split, last_split, sequence.span.pages[view.scheme->group], rows,
                           workspaces_[static_cast<size_t>(worker)]);
    };
    const auto attention_of_task = [&](size_t index, int worker) {
      const SplitTask& task = list.tasks[index];
      return attention_of(list.tiles[static_cast<size_t>(task.tile)], task.first_split, task.last_split, worker);
    };
    auto attend = [&](int64_t task_batch, int worker) {
      const kernels::KernelScope scope(kernels_);
      const auto [begin, end] = list.BatchOf(task_batch);
      std::optional<TileAttention> task_and_next[2];
      task_and_next[begin % 2].emplace(attention_of_task(begin, worker));
      for (size_t index = begin; index < end; ++index) {
        TileAttention& current = *task_and_next[index % 2];
        std::optional<TileAttention>& next = task_and_next[(index + 1) % 2];
        if (index + 1 < end) current.SetNext(next.emplace(attention_of_task(index + 1, worker)));
        const SplitTask& task = list.tasks[index];
        const QueryTile& tile = list.tiles[static_cast<size_t>(task.tile)];
        if (tile.split_slot < 0) {
          current.Finish();
          continue;
        }
        const int64_t split_rows = int64_t{tile.kv_heads} * tile.tokens * list.shape.Group();
        const int64_t slot = tile.split_slot + (task.first_split - tile.first_split) * split_rows;
        current.StoreSplitResult(cpu_plan.split_states.data() + slot,
                                 cpu_plan.split_out.data() + slot * list.shape.head_dim);
      }
    };
    threads_->ForEach(list.Batches(), attend);
    if (list.combines.empty()) return;
    auto combine = [&](int64_t index, int worker) {
      const CombineTask& task = list.combines[static_cast<size_t>(index)];
      const QueryTile& tile = list.tiles[static_cast<size_t>(task.tile)];
      attention_of(tile, tile.first_split, tile.last_split, worker)
          .CombineSplits(task.head, cpu_plan.split_states.data() + tile.split_slot,
                         cpu_plan.split_out.data() + tile.split_slot * list.shape.head_dim);
    };
    threads_->ForEach(static_cast<int64_t>(list.combines.size()), combine);
  }

  cache::PagePool& pool_;
  const BackendConfig config_;
  const cache::KvCacheSpec spec_;
  std::shared_ptr<ThreadPool> threads_;
  const kernels::IsaTable& isa_;
  const kernels::AttentionKernels& kernels_;
  CacheWriter writer_;
  std::vector<LayerView> layers_;
  std::vector<WorkShape> shapes_;
  std::vector<size_t> list_of_layer_;
  std::vector<TileWorkspace> workspaces_;
  std::optional<TokenSelector> selector_;  // with the next one: of models with sparse attention
  std::optional<GatheredAttention> gathered_;
  std::optional<CompressedAttention> compressed_;  // of models whose layers have shared_kv
  std::optional<ContextParallel> context_;         // null: this rank has all pages
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(cache::PagePool& pool, BackendConfig config,
                                        std::shared_ptr<ThreadPool> threads, const char* isa) {
  return MakeCpuBackend(pool, std::move(config), std::move(threads), kernels::SelectIsa(isa));
}

std::unique_ptr<Backend> MakeCpuBackend(cache::PagePool& pool, BackendConfig config,
                                        std::shared_ptr<ThreadPool> threads, const kernels::IsaTable& isa) {
  return std::make_unique<CpuBackend>(pool, std::move(config), std::move(threads), isa);
}

bool CpuSupports(const formats::LayerScheme& layer) {
  // Every unit attends to the same formats; the last one needs no permission of the system.
  return Attends(*kernels::SelectIsa(kernels::RunnableIsas().back()).attention, layer);
}

}  // namespace kvanta::attention
