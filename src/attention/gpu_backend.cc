#include "attention/gpu_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "attention/gpu_layers.h"
#include "attention/step_metadata.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using kernels::cuda::AppendParams;
using kernels::cuda::AppendSums;
using kernels::cuda::AttentionMetadata;
using kernels::cuda::AttentionParams;
using kernels::cuda::PageIds;
using kernels::cuda::Slot;
using kernels::cuda::SlotMapping;

// No two plans, nor two states of one, have the same.
uint64_t NextVersion() {
  static std::atomic<uint64_t> versions = 0;
  return ++versions;
}

// The head of a plan's block: for each KV cache group the slots of its rows and of its pages that close, then
// AttentionMetadata for each shape of layers.
constexpr size_t RowsAt(int group) {
  return 2 * static_cast<size_t>(group) * sizeof(SlotMapping);
}
constexpr size_t ClosingAt(int group) {
  return RowsAt(group) + sizeof(SlotMapping);
}

// Layers that share their work list and block table.
struct LayerShape {
  WorkShape work;
  int group = 0;
  bool operator==(const LayerShape&) const = default;
};

// A group's part of a step.
struct GroupStep {
  std::vector<Slot> rows, closing;   // of Append
  std::vector<PageIds> pages;        // block tables, one after the other
  std::vector<int32_t> first_pages;  // [sequence], in pages
  int32_t max_closing = 0;           // what Append's grid is made for
};

class GpuPlan final : public Plan {
 public:
  uint64_t Version() const noexcept override { return version; }
  template <class T>
  const T* At(size_t offset) const noexcept {
    return reinterpret_cast<const T*>(block.Address() + offset);
  }

  Batch batch;
  std::vector<GpuSchedule> shapes;
  std::vector<GroupStep> groups;
  StepMetadata block;
  Buffer split_out, split_state;
  // Sizes that grids are made for: rows, and the tiles of each shape.
  int32_t max_rows = 0;
  std::vector<int32_t> max_tiles;
  uint64_t backend = 0;  // whose version it was made for
  uint64_t version = 0;
};

// At least `bytes`.
void Grow(Device& device, Buffer& buffer, int64_t bytes) {
  const auto requested = static_cast<size_t>(bytes);
  if (buffer.bytes() < requested) buffer = device.Allocate(requested + requested / 2);
}

class GpuBackend final : public Backend {
 public:
  GpuBackend(cache::PagePool& store, BackendConfig config, std::shared_ptr<kernels::CudaContext> gpu,
             int64_t max_parallel_splits)
      : store_(store),
        config_(CheckConfig(std::move(config), store.Layout())),
        spec_(SpecOf(store, config_)),
        gpu_(std::move(gpu)),
        max_parallel_splits_(max_parallel_splits) {
    if (&store.device() != &gpu_->device()) {
      throw InputError(fmt::format("the cache lies in the memory of {}, attention would run on {}",
                                   store.device().Name(), gpu_->device().Name()));
    }
    const size_t layers = config_.layers.size();
    fetched_.resize(layers * 2);
    sums_ = device().Allocate(fetched_.size() * sizeof(AppendSums));
    for (size_t i = 0; i < layers; ++i) AddLayer(i);
  }

  BackendInfo Info() const override {
    BackendInfo info{.name = gpu_->Name(), .codes = {}};
    for (const formats::Format& format : formats::All()) {
      const bool known = std::find(info.codes.begin(), info.codes.end(), format.code) != info.codes.end();
      if (!known && kernels::cuda::FindAppend(format) >= 0) info.codes.push_back(format.code);
    }
    return info;
  }

  std::unique_ptr<Plan> MakePlan(const BatchShape& batch, std::unique_ptr<Plan> reused) override {
    std::unique_ptr<Plan> plan = reused ? std::move(reused) : std::make_unique<GpuPlan>();
    GpuPlan* gpu_plan = dynamic_cast<GpuPlan*>(plan.get());
    if (gpu_plan == nullptr) throw InputError("MakePlan: the plan to reuse was made by another backend");
    gpu_->Check();
    MakeBatch(batch, store_, spec_, gpu_plan->batch);
    FillRows(*gpu_plan);
    FillWork(*gpu_plan);
    SetGrids(batch.bucket, *gpu_plan);
    CopyBlock(*gpu_plan);
    return plan;
  }

  void Append(Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    const GpuPlan& step = static_cast<const GpuPlan&>(plan);
    const GpuLayer& launches = layers_[static_cast<size_t>(layer)];
    for (const GpuCell& launch : launches.cells) {
      AppendParams side = launch.side;
      side.rows = (side.is_key ? k : v) + launch.first_channel;
      side.stride = kv_stride;
      side.list = step.At<SlotMapping>(RowsAt(launches.group));
      side.limit = step.max_rows;
      side.to_exact = launches.exact_open;
      gpu_->Append(side.to_exact ? launch.exact_kernel : launch.kernel, side);
      const int32_t max_closing = step.groups[static_cast<size_t>(launches.group)].max_closing;
      if (!launches.exact_open || max_closing == 0) continue;
      side.list = step.At<SlotMapping>(ClosingAt(launches.group));
      side.limit = max_closing;
      side.to_exact = false;
      side.from_exact = true;
      gpu_->Append(launch.kernel, side);
    }
  }

  void Run(Plan& plan, int layer, const float* q, int64_t q_stride, float* out) noexcept override {
    const GpuPlan& step = static_cast<const GpuPlan&>(plan);
    const GpuLayer& launches = layers_[static_cast<size_t>(layer)];
    const size_t shape = shape_of_[static_cast<size_t>(layer)];
    AttentionParams attend = launches.attend;
    attend.q = q;
    attend.q_stride = q_stride;
    attend.out = out;
    attend.step = step.At<AttentionMetadata>(StepAt(shape));
    attend.max_tiles = step.max_tiles[shape];
    gpu_->Attend(launches.attend_kernel, attend);
  }

  AppendCounts Counts(int layer) const override {
    const std::lock_guard lock(fetching_);
    const AppendSums* sums = fetched_.data() + size_t{2} * static_cast<size_t>(layer);
    const auto counts = [](const AppendSums& side) {
      SideCounts result;
      result.values = side.values;
      result.saturated = side.saturated;
      result.nan = side.nan;
      result.blocks = side.blocks;
      result.zero_blocks = side.zero_blocks;
      return result;
    };
    return {.k = counts(sums[0]), .v = counts(sums[1])};
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
  size_t StepAt(size_t shape) const { return RowsAt(store_.Groups()) + shape * sizeof(AttentionMetadata); }

  void AddLayer(size_t index) {
    const AttentionSpec& attention = config_.layers[index];
    layers_.push_back(made_layers_.Make(index, sums_.as<AppendSums>() + 2 * index, gpu_->Name()));
    const LayerShape shape{.work = {.heads = attention.heads,
                                    .kv_heads = attention.kv_heads,
                                    .head_dim = attention.head_dim,
                                    .visibility = attention.visibility},
                           .group = store_.Layout().layers[index].group};
    const auto known = std::find(shapes_.begin(), shapes_.end(), shape);
    shape_of_.push_back(static_cast<size_t>(known - shapes_.begin()));
    if (known == shapes_.end()) shapes_.push_back(shape);
  }

  // Where each row goes, and the slots of pages that close.
  void FillRows(GpuPlan& plan) {
    const int page_size = store_.Layout().page_size;
    plan.groups.resize(plan.batch.writes.size());
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      GroupStep& group = plan.groups[g];
      group.rows.clear();
      group.closing.clear();
      for (const PageWrite& write : plan.batch.writes[g]) {
        const auto slot_of = [&](int slot) {
          return Slot{.quantized = write.page.quantized,
                      .exact = write.page.exact,
                      .slot = slot,
                      .row = static_cast<int32_t>(write.first_row + slot - write.first_slot)};
        };
        for (int slot = write.first_slot; slot < write.last_slot; ++slot) group.rows.push_back(slot_of(slot));
        if (write.last_slot != page_size || write.page.quantized == cache::kNoPage) continue;
        for (int slot = 0; slot < page_size; ++slot) group.closing.push_back(slot_of(slot));
      }
    }
  }

  void FillWork(GpuPlan& plan) {
    const int page_size = store_.Layout().page_size;
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      GroupStep& group = plan.groups[g];
      group.pages.clear();
      group.first_pages.clear();
      for (const SequenceRows& sequence : plan.batch.sequences) {
        group.first_pages.push_back(static_cast<int32_t>(group.pages.size()));
        const cache::PageRef* table = sequence.span.pages[g];
        for (int64_t page = 0; page * page_size < sequence.End(); ++page) {
          group.pages.push_back({table[page].quantized, table[page].exact});
        }
      }
    }
    plan.shapes.resize(shapes_.size());
    int64_t slots = 0;
    int64_t floats = 0;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      GpuSchedule& work = plan.shapes[i];
      MakeGpuSchedule(shapes_[i].work, plan.batch, plan.groups[static_cast<size_t>(shapes_[i].group)].first_pages,
                      page_size, max_parallel_splits_, work);
      slots = std::max(slots, work.slots);
      floats = std::max(floats, work.slots * shapes_[i].work.head_dim);
    }
    Grow(device(), plan.split_out, floats * int64_t{sizeof(float)});
    Grow(device(), plan.split_state, 2 * slots * int64_t{sizeof(float)});
  }

  // Of this step, or of the largest of its bucket.
  void SetGrids(int64_t bucket, GpuPlan& plan) {
    plan.max_tiles.clear();
    plan.max_rows = static_cast<int32_t>(bucket > 0 ? bucket : plan.batch.rows);
    for (GroupStep& group : plan.groups) {
      group.max_closing =
          static_cast<int32_t>(bucket > 0 ? bucket * store_.Layout().page_size : std::ssize(group.closing));
    }
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const int64_t of_bucket = bucket * TilesOfToken(shapes_[i].work);
      plan.max_tiles.push_back(static_cast<int32_t>(bucket > 0 ? of_bucket : std::ssize(plan.shapes[i].tiles)));
    }
  }

  void CopyBlock(GpuPlan& plan) {
    StepMetadata& block = plan.block;
    block.Begin(StepAt(shapes_.size()));
    std::vector<size_t>& places = plan_places_;
    places.clear();
    for (const GroupStep& group : plan.groups) {
      places.push_back(block.Add(group.rows));
      places.push_back(block.Add(group.closing));
      places.push_back(block.Add(group.pages));
    }
    const size_t first_shape = places.size();
    for (const GpuSchedule& work : plan.shapes) {
      places.push_back(block.Add(work.tiles));
      places.push_back(block.Add(work.tasks));
    }
    const bool moved = block.Reserve(device());
    if (moved || plan.backend != version_) plan.version = NextVersion();
    plan.backend = version_;
    const auto list = [&](size_t at, size_t count) {
      return SlotMapping{.places = plan.At<Slot>(at), .count = static_cast<int32_t>(count)};
    };
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      block.Write(RowsAt(static_cast<int>(g)), list(places[3 * g], plan.groups[g].rows.size()));
      block.Write(ClosingAt(static_cast<int>(g)), list(places[3 * g + 1], plan.groups[g].closing.size()));
    }
    for (size_t i = 0; i < plan.shapes.size(); ++i) {
      const GpuSchedule& work = plan.shapes[i];
      block.Write(StepAt(i),
                  AttentionMetadata{.pages = plan.At<PageIds>(places[3 * static_cast<size_t>(shapes_[i].group) + 2]),
                                    .tiles = plan.At<kernels::cuda::QueryTile>(places[first_shape + 2 * i]),
                                    .tasks = plan.At<kernels::cuda::SplitTask>(places[first_shape + 2 * i + 1]),
                                    .tile_count = static_cast<int32_t>(work.tiles.size()),
                                    .task_count = static_cast<int32_t>(work.tasks.size()),
                                    .split_out = plan.split_out.as<float>(),
                                    .split_state = plan.split_state.as<float>()});
    }
    block.Copy(device());
  }

  cache::PagePool& store_;
  const BackendConfig config_;
  const cache::KvCacheSpec spec_;
  std::shared_ptr<kernels::CudaContext> gpu_;
  const int64_t max_parallel_splits_;
  Buffer sums_;                      // AppendSums [layers][k, v]
  std::vector<AppendSums> fetched_;  // the host's copy
  mutable std::mutex fetching_;
  GpuLayers made_layers_{store_, config_};
  std::vector<GpuLayer> layers_;
  std::vector<LayerShape> shapes_;
  std::vector<size_t> shape_of_;     // of each layer, in shapes_
  std::vector<size_t> plan_places_;  // of tiles and tasks in a plan's block, by shape
  const uint64_t version_ = NextVersion();
};

}  // namespace

std::unique_ptr<Backend> MakeGpuBackend(cache::PagePool& store, BackendConfig config,
                                        std::shared_ptr<kernels::CudaContext> gpu, int64_t max_parallel_splits) {
  return std::make_unique<GpuBackend>(store, std::move(config), std::move(gpu), max_parallel_splits);
}

}  // namespace kvanta::attention
