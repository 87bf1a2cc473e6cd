#include "attention/gpu_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

#include "attention/gpu_plan.h"
#include "attention/gpu_slots.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using kernels::cuda::AppendSums;
using kernels::cuda::AttentionMetadata;
using kernels::cuda::AttentionParams;
using kernels::cuda::PageIds;
using kernels::cuda::Slot;
using kernels::cuda::SlotMapping;

// Unique in the process: identifies a backend, or a state of a plan.
uint64_t NextVersion() {
  static std::atomic<uint64_t> versions = 0;
  return ++versions;
}

class GpuBackend final : public Backend {
 public:
  GpuBackend(cache::PagePool& pool, BackendConfig config, std::shared_ptr<kernels::CudaContext> gpu,
             int64_t max_result_rows, bool makes_groups)
      : pool_(pool),
        config_(CheckConfig(std::move(config), pool.Layout(), {"cuda", kernels::cuda::kMaxHeadDim})),
        spec_(SpecOf(pool, config_)),
        gpu_(std::move(gpu)),
        max_result_rows_(max_result_rows),
        makes_groups_(makes_groups) {
    if (&pool.device() != &gpu_->device()) {
      throw InputError(fmt::format("the KV cache is on {}, attention on {}; expected the same device",
                                   pool.device().Name(), gpu_->device().Name()));
    }
    const bool is_recurrent = std::ranges::any_of(pool.Layout().layers, &formats::LayerScheme::IsRecurrent);
    if (is_recurrent && pool.Layout().state_grid != 0) {
      throw InputError(
          fmt::format("state_cache_dtype {}: {} does not support states that are rounded; there is: float32 "
                      "(device cpu has all)",
                      formats::Name(pool.Layout().state_code), gpu_->Name()));
    }
    const size_t layers = config_.layers.size();
    fetched_.resize(layers * 2);
    sums_ = device().Allocate(fetched_.size() * sizeof(AppendSums));
    for (size_t i = 0; i < layers; ++i) AddLayer(i);
    if (TopkOf(config_.layers) != 0) AddSparse();
  }

  BackendInfo Info() const override {
    BackendInfo info{.name = gpu_->Name(), .codes = {}};
    for (const formats::Format& format : formats::All()) {
      const bool known = std::find(info.codes.begin(), info.codes.end(), format.code) != info.codes.end();
      if (!known && kernels::cuda::FindAppend(format) >= 0) info.codes.push_back(format.code);
    }
    return info;
  }

  std::unique_ptr<Plan> MakePlan(const BatchShape& batch, std::unique_ptr<Plan> plan) override {
    auto& gpu_plan = ReuseOrMake<GpuPlan>(plan);
    device().Synchronize();
    MakeBatch(batch, pool_, spec_, gpu_plan.batch);
    FillSlots(entries_, pool_.Layout().page_size, gpu_plan);
    FillPages(pool_.Layout().page_size, gpu_plan);
    FillSchedules(batch.bucket, gpu_plan);
    SetGridSizes(batch.bucket, gpu_plan);
    UploadMetadata(gpu_plan);
    return plan;
  }

  void Append(Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    AppendHeads(plan, layer, {.k = k, .v = v, .kv_stride = kv_stride});
  }

  bool TransformsHeads(int layer) const noexcept override {
    return attention::TransformsHeads(layers_[static_cast<size_t>(layer)]);
  }
  void AppendHeads(Plan& plan, int layer, const HeadRows& rows) noexcept override {
    const GpuPlan& step = static_cast<const GpuPlan&>(plan);
    const GpuLayer& gpu_layer = layers_[static_cast<size_t>(layer)];
    AppendStep append{.rows = rows,
                      .slots = step.DevicePointer<SlotMapping>(RowSlotsOffset(gpu_layer.slots)),
                      .max_slots = step.max_rows};
    if (gpu_layer.exact_open) {
      append.closed_slots = step.DevicePointer<SlotMapping>(ClosedSlotsOffset(gpu_layer.slots));
      append.max_closed_slots = step.groups[static_cast<size_t>(gpu_layer.slots)].max_closed_slots;
      append.is_decode = step.is_decode;
    }
    AppendCells(gpu_layer, append, *gpu_);
  }

  void Run(Plan& plan, int layer, const float* q, int64_t q_stride, float* out,
           const kernels::Linear* reader) noexcept override {
    const GpuPlan& step = static_cast<const GpuPlan&>(plan);
    const GpuLayer& gpu_layer = layers_[static_cast<size_t>(layer)];
    const size_t shape = shape_of_[static_cast<size_t>(layer)];
    AttentionParams params = ParamsOf(step, layer);
    params.q = q;
    params.q_stride = q_stride;
    params.out = out;
    if (pool_.Layout().layers[static_cast<size_t>(layer)].shared_kv) return RunCompressed(step, layer, params);
    SetMetadata(step.lists[shape], params.metadata, params);
    params.max_tiles = step.max_tiles[shape];
    params.tile_rows = step.tile_rows[shape];
    const WorkShape& work = shapes_[shape].work;
    if (!work.is_sparse && params.max_tiles != 0) {
      PackOutputs(reader, step.max_rows, step.is_decode ? TilesPerToken(work) : 0, params);
    }
    if (params.max_tiles != 0) gpu_->Attend(gpu_layer.attend_kernel, params);
    if (!work.is_sparse) return;
    sparse_->Run(step.sparse, step.metadata, pool_.Layout().layers[static_cast<size_t>(layer)], sparse_->ShapeOf(work),
                 params, gpu_layer.attend_kernel, *gpu_);
  }

  void Select(Plan& plan, int layer, const float* q, int64_t q_stride, const float* weights) noexcept override {
    const GpuPlan& step = static_cast<const GpuPlan&>(plan);
    AttentionParams keys = ParamsOf(step, layer);
    keys.q = q;
    keys.q_stride = q_stride;
    sparse_->Select(step.sparse, step.metadata, keys, weights, *gpu_);
  }
  std::span<const int32_t> Selected(const Plan& plan, int64_t row) const noexcept override {
    if (!sparse_) return {};
    return sparse_->Selected(static_cast<const GpuPlan&>(plan).sparse, row);
  }

  cache::StateStep States(const Plan& plan, int layer) const noexcept override {
    const GpuPlan& step = static_cast<const GpuPlan&>(plan);
    cache::StateStep states = StatesOf(step.batch, pool_, layer);
    states.table = step.DevicePointer<cache::StateTable>(StatesOffset());
    states.max_sequences = step.max_sequences;
    return states;
  }

  void AcceptDrafts(Plan& plan, std::span<const int> accepted) const noexcept override {
    GpuPlan& step = static_cast<GpuPlan&>(plan);
    attention::AcceptDrafts(accepted, step.batch);
    step.max_sequences = std::ssize(step.batch.first_segments);
    WriteStates(step);
    try {
      step.metadata.Upload(device());
    } catch (const ResourceError&) {  // a GPU's errors last: the next synchronization throws it
    }
  }

  AppendCounts Counts(int layer) const override {
    const std::lock_guard lock(fetching_);
    const AppendSums* sums = fetched_.data() + size_t{2} * static_cast<size_t>(layer);
    return {.k = CountsOf(sums[0]), .v = CountsOf(sums[1])};
  }

  void FetchCounts() override {
    std::vector<AppendSums> sums(fetched_.size());
    device().CopyOut(sums.data(), sums_.data(), sums_.bytes());
    const std::lock_guard lock(fetching_);
    fetched_.swap(sums);
  }

  const formats::LayerScales& Scales(int layer) const override { return config_.scales.at(static_cast<size_t>(layer)); }

 private:
  Device& device() const { return gpu_->device(); }
  size_t AttentionOffset(size_t shape) const {
    return RowSlotsOffset(pool_.Groups() + static_cast<int>(entries_.size())) + shape * kScheduleBytes;
  }
  // A layer's arguments with the step's metadata.
  AttentionParams ParamsOf(const GpuPlan& plan, int layer) const noexcept {
    AttentionParams params = layers_[static_cast<size_t>(layer)].attention;
    params.metadata = plan.DevicePointer<AttentionMetadata>(AttentionOffset(shape_of_[static_cast<size_t>(layer)]));
    return params;
  }

  void RunCompressed(const GpuPlan& plan, int index, const AttentionParams& params) noexcept {
    const GpuLayer& layer = layers_[static_cast<size_t>(index)];
    const AttentionSpec& spec = config_.layers[static_cast<size_t>(index)];
    const AttentionParams entries = ParamsOf(plan, std::max(0, spec.entries_layer));
    compressed_->Run(
        plan.compressed, plan.metadata,
        {.scheme = pool_.Layout().layers[static_cast<size_t>(index)],
         .shape = layer.compressed,
         .kernel = layer.attend_kernel,
         .params = params,
         .entries = spec.entries_layer < 0 ? nullptr : &entries,
         .selection = spec.index_topk == 0 ? nullptr : plan.DevicePointer<kernels::cuda::SparseStep>(SparseOffset())},
        *gpu_);
  }

  size_t StatesOffset() const { return AttentionOffset(shapes_.size()); }
  size_t SparseOffset() const { return StatesOffset() + sizeof(cache::StateTable); }

  void AddSparse() {
    std::vector<GpuSparseShape> shapes;
    for (const LayerShape& shape : shapes_) {
      if (shape.work.is_sparse && shape.has_tiles) shapes.push_back({shape.work, shape.partition});
    }
    sparse_.emplace(pool_.Layout(), config_.layers, std::move(shapes), max_result_rows_, device());
  }

  void AddLayer(size_t index) {
    if (pool_.Layout().layers[index].IsRecurrent()) {
      layers_.emplace_back();
      shape_of_.push_back(0);
      return;
    }
    const formats::LayerScheme& scheme = pool_.Layout().layers[index];
    GpuLayer& layer = layers_.emplace_back(builder_.Build(index, sums_.as<AppendSums>() + 2 * index, gpu_->Name()));
    const auto blocks = [&](int32_t tile_rows) {
      AttentionParams params = layer.attention;
      params.tile_rows = tile_rows;
      return gpu_->AttentionBlocks(layer.attend_kernel, params);
    };
    const WorkShape work = WorkShapeOf(config_.layers[index], scheme);
    const bool has_tiles = !scheme.keys_only && !scheme.shared_kv, has_groups = makes_groups_ && has_tiles;
    const LayerShape shape{
        .work = work,
        .has_tiles = has_tiles,
        .group = scheme.group,
        .partition = {.small_blocks = blocks(kernels::cuda::kRowsPerMma),
                      .large_blocks = blocks(MaxTileRows(work)),
                      .group_blocks = has_groups ? gpu_->GroupBlocks(layer.attend_kernel, layer.attention) : 0,
                      .max_result_rows = max_result_rows_}};
    if (scheme.row_tokens != 1) {  // after the slots of the KV cache groups
      const EntryRows entries{.group = scheme.group, .row_tokens = scheme.row_tokens, .of_page = scheme.shape.tokens};
      layer.slots = pool_.Groups() + static_cast<int>(FindOrAdd(entries, entries_));
    }
    if (scheme.shared_kv && scheme.row_tokens == 1) layer.compressed = AddCompressed(index, shape);
    shape_of_.push_back(FindOrAdd(shape, shapes_));
  }

  size_t AddCompressed(size_t index, const LayerShape& shape) {
    const AttentionSpec& spec = config_.layers[index];
    const auto entries = static_cast<size_t>(spec.entries_layer);
    if (!compressed_) compressed_.emplace(pool_.Layout().page_size, max_result_rows_, device());
    CompressedShape compressed{.work = shape.work,
                               .window = spec.visibility.span,
                               .row_tokens = spec.entries_layer < 0 ? 0 : pool_.Layout().layers[entries].row_tokens,
                               .top_k = spec.index_topk,
                               .partition = shape.partition};
    compressed.work.visibility = {};
    return compressed_->AddLayer(compressed, pool_.Layout().layers[index]);
  }

  void FillSchedules(int64_t bucket, GpuPlan& plan) {
    plan.schedules.resize(shapes_.size());
    static const Batch kNoRows;
    if (sparse_) sparse_->MakePlan(plan.batch, bucket, plan.sparse);
    if (compressed_) compressed_->MakePlan(plan.batch, bucket, sparse_ ? &plan.sparse : nullptr, plan.compressed);
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const LayerShape& shape = shapes_[i];
      const Batch& batch = !shape.has_tiles ? kNoRows : shape.work.is_sparse ? plan.sparse.dense : plan.batch;
      MakeGpuSchedule(shape.work, batch, plan.groups[static_cast<size_t>(shape.group)].first_pages,
                      pool_.Layout().page_size, shape.partition, plan.schedules[i]);
      plan.results.Include(plan.schedules[i], shape.work.head_dim);
    }
    for (size_t i = 0; sparse_ && i < plan.sparse.schedules.size(); ++i) {
      plan.results.Include(plan.sparse.schedules[i], sparse_->ShapeAt(i).work.head_dim);
    }
    for (size_t i = 0; compressed_ && i < plan.compressed.shapes.size(); ++i) {
      for (const GpuSchedule& schedule : plan.compressed.shapes[i].schedules) {
        plan.results.Include(schedule, compressed_->ShapeAt(i).work.head_dim);
      }
    }
    plan.results.Reserve(device(), plan.batch.rows);
  }

  // Grid sizes of this step, or of the largest step of its bucket.
  void SetGridSizes(int64_t bucket, GpuPlan& plan) {
    plan.max_tiles.clear();
    plan.tile_rows.clear();
    plan.lists.clear();
    plan.max_rows = static_cast<int32_t>(bucket > 0 ? bucket : plan.batch.rows);
    plan.max_sequences = bucket > 0 ? bucket : std::ssize(plan.batch.sequences);
    plan.is_decode = plan.batch.rows == std::ssize(plan.batch.sequences);
    for (GroupStep& group : plan.groups) {
      group.max_closed_slots =
          static_cast<int32_t>(bucket > 0 ? bucket * pool_.Layout().page_size : std::ssize(group.closed_slots));
    }
    for (size_t i = 0; i < shapes_.size(); ++i) {
      plan.max_tiles.push_back(static_cast<int32_t>(bucket > 0 ? bucket * TilesPerToken(shapes_[i].work)
                                                               : std::ssize(plan.schedules[i].tiles)));
      plan.tile_rows.push_back(bucket > 0 ? TileRowsOfToken(shapes_[i].work) : plan.schedules[i].tile_rows);
      plan.lists.push_back(ListsOf(plan.schedules[i], shapes_[i].work, shapes_[i].partition, bucket));
    }
  }

  void UploadMetadata(GpuPlan& plan) {
    StepMetadata& metadata = plan.metadata;
    plan.sparse.header = SparseOffset();
    size_t header = SparseOffset() + (sparse_ ? sparse_->HeaderBytes(plan.sparse) : 0);
    if (compressed_) header += compressed_->HeaderBytes(plan.compressed, header);
    metadata.Begin(header);
    std::vector<size_t>& offsets = array_offsets_;
    offsets.clear();
    for (const GroupStep& group : plan.groups) {
      offsets.push_back(metadata.Add(group.row_slots));
      offsets.push_back(metadata.Add(group.closed_slots));
      offsets.push_back(metadata.Add(group.pages));
      offsets.push_back(metadata.Add(group.first_pages));
    }
    const size_t first_entries = offsets.size();
    for (const std::vector<Slot>& slots : plan.entry_slots) offsets.push_back(metadata.Add(slots));
    const size_t first_shape = offsets.size();
    for (const GpuSchedule& schedule : plan.schedules) AddSchedule(schedule, metadata, offsets);
    if (sparse_) sparse_->AddArrays(metadata, plan.sparse);
    if (compressed_) compressed_->AddArrays(metadata, plan.compressed);
    plan.segments_offset = metadata.Add(plan.batch.state_segments);
    plan.first_segments.resize(plan.batch.first_segments.size() + 1);
    plan.first_segments_offset = metadata.Add(plan.first_segments);
    const uint64_t capacities = compressed_ ? compressed_->Capacities() : 0;
    const bool moved = metadata.Reserve(device()) || plan.compressed.capacities != capacities;
    plan.compressed.capacities = capacities;
    if (moved || plan.backend != version_) plan.version = NextVersion();
    plan.backend = version_;
    const auto mapping = [&](size_t offset, size_t count) {
      return SlotMapping{.slots = plan.DevicePointer<Slot>(offset), .count = static_cast<int32_t>(count)};
    };
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      metadata.Write(RowSlotsOffset(static_cast<int>(g)), mapping(offsets[4 * g], plan.groups[g].row_slots.size()));
      metadata.Write(ClosedSlotsOffset(static_cast<int>(g)),
                     mapping(offsets[4 * g + 1], plan.groups[g].closed_slots.size()));
    }
    for (size_t i = 0; i < plan.entry_slots.size(); ++i) {
      metadata.Write(RowSlotsOffset(pool_.Groups() + static_cast<int>(i)),
                     mapping(offsets[first_entries + i], plan.entry_slots[i].size()));
    }
    for (size_t i = 0; i < plan.schedules.size(); ++i) {
      const auto group = static_cast<size_t>(shapes_[i].group);
      WriteSchedule(plan.schedules[i], offsets.data() + first_shape + kScheduleArrays * i,
                    plan.DevicePointer<PageIds>(offsets[4 * group + 2]),
                    plan.DevicePointer<int32_t>(offsets[4 * group + 3]), plan.results, AttentionOffset(i), metadata);
    }
    if (sparse_) sparse_->WriteHeader(metadata, plan.sparse, plan.results);
    if (compressed_) compressed_->WriteHeader(metadata, plan.compressed, plan.results);
    WriteStates(plan);
    metadata.Upload(device());
  }

  // Writes the segments of states, which are no more than before.
  void WriteStates(GpuPlan& plan) const noexcept {
    const Batch& batch = plan.batch;
    plan.first_segments.assign(batch.first_segments.begin(), batch.first_segments.end());
    plan.first_segments.push_back(static_cast<int32_t>(batch.state_segments.size()));
    plan.metadata.Replace(plan.segments_offset, batch.state_segments);
    plan.metadata.Replace(plan.first_segments_offset, plan.first_segments);
    plan.metadata.Write(StatesOffset(),
                        cache::StateTable{.segments = plan.DevicePointer<cache::StateSegment>(plan.segments_offset),
                                          .first_segments = plan.DevicePointer<int32_t>(plan.first_segments_offset),
                                          .sequences = static_cast<int32_t>(batch.first_segments.size())});
  }

  cache::PagePool& pool_;
  const BackendConfig config_;
  const cache::KvCacheSpec spec_;
  std::shared_ptr<kernels::CudaContext> gpu_;
  const int64_t max_result_rows_;
  const bool makes_groups_;
  Buffer sums_;                      // AppendSums [layers][k, v]
  std::vector<AppendSums> fetched_;  // the host's copy
  mutable std::mutex fetching_;
  GpuLayerBuilder builder_{pool_, config_};
  std::vector<GpuLayer> layers_;
  std::vector<LayerShape> shapes_;
  std::vector<size_t> shape_of_;             // by layer: index in shapes_
  std::vector<EntryRows> entries_;           // of layers whose rows stand for several tokens
  std::optional<GpuSparse> sparse_;          // of models with sparse attention
  std::optional<GpuCompressed> compressed_;  // of models whose layers have shared_kv
  std::vector<size_t> array_offsets_;        // offsets of a plan's arrays in its metadata
  const uint64_t version_ = NextVersion();
};

}  // namespace

std::unique_ptr<Backend> MakeGpuBackend(cache::PagePool& pool, BackendConfig config,
                                        std::shared_ptr<kernels::CudaContext> gpu, int64_t max_result_rows,
                                        bool makes_groups) {
  return std::make_unique<GpuBackend>(pool, std::move(config), std::move(gpu), max_result_rows, makes_groups);
}

}  // namespace kvanta::attention
