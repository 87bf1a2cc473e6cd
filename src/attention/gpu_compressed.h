// Attention on a GPU to rows that are K and V in one, of a window and compressed (docs/adr/0095): what each row of a
// step attends to is copied to pages of its own, in waves of as many rows as their memory allows. How many pages and
// splits a row has follows from its position alone, so its bits do not depend on its wave.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/gpu_layers.h"
#include "attention/gpu_schedule.h"
#include "attention/gpu_sparse.h"
#include "attention/step_metadata.h"

namespace kvanta::attention {

// Layers whose rows attend to as much.
struct CompressedShape {
  WorkShape work;      // of copies: without a window
  int window = 0;      // tokens
  int row_tokens = 0;  // of entries; 0: there are none
  int top_k = 0;       // entries that are chosen; 0: all
  GpuPartition partition;

  bool operator==(const CompressedShape&) const = default;
};

struct GpuCompressedPlan {
  // Entries and windows of a step's rows in layers of a shape.
  struct Shape {
    std::vector<kernels::cuda::CompressedRow> rows;
    std::vector<GpuSchedule> schedules;  // [wave]
    size_t header = 0;                   // offset in the metadata: CompressedStep, then schedules [wave]
    size_t rows_offset = 0;
    std::vector<size_t> schedule_offsets;
  };
  std::vector<Shape> shapes;
  int64_t max_rows = 0;     // of any step of the plan's bucket
  uint64_t capacities = 0;  // GpuCompressed::Capacities() that launches were made for
};

class GpuCompressed {
 public:
  // max_result_rows: as MakeGpuBackend takes it. The device outlives this.
  GpuCompressed(int page_size, int64_t max_result_rows, Device& device)
      : page_size_(page_size), max_result_rows_(max_result_rows), device_(device) {}

  // Adds a layer whose rows are K and V in one, and returns its shape's index.
  size_t AddLayer(const CompressedShape& shape, const formats::LayerScheme& scheme);
  const CompressedShape& ShapeAt(size_t index) const noexcept { return shapes_[index]; }

  // Finds what the step's rows attend to, and schedules them. selected: null, or the rows that choose entries.
  void MakePlan(const Batch& batch, int64_t bucket, const GpuSparsePlan* selected, GpuCompressedPlan& plan);
  // Changes where pages of a row's copies grow in number: launches of earlier steps are not valid then.
  uint64_t Capacities() const noexcept { return capacities_; }

  // Places the plan's header at this offset of the metadata, and returns its bytes.
  size_t HeaderBytes(GpuCompressedPlan& plan, size_t header) const noexcept;
  // Adds the plan's arrays, and, after StepMetadata::Reserve, writes its header.
  void AddArrays(StepMetadata& metadata, GpuCompressedPlan& plan) const;
  void WriteHeader(StepMetadata& metadata, const GpuCompressedPlan& plan, const GpuSplitResults& results) const;

  // A layer's shape and kernel, and its arguments, with q, out and metadata; and those of the layer of its entries.
  struct Layer {
    const formats::LayerScheme& scheme;
    size_t shape = 0;
    int kernel = 0;
    const kernels::cuda::AttentionParams& params;
    const kernels::cuda::AttentionParams* entries = nullptr;  // null: none
    const kernels::cuda::SparseStep* selection = nullptr;     // null: all entries
  };
  void Run(const GpuCompressedPlan& plan, const StepMetadata& metadata, const Layer& layer,
           kernels::CudaContext& gpu) const noexcept;

 private:
  int64_t WaveRows(size_t shape) const noexcept;
  void Reserve(size_t shape, int64_t pages, int64_t max_rows);

  const int page_size_;
  const int64_t max_result_rows_;
  Device& device_;
  std::vector<CompressedShape> shapes_;
  std::vector<int64_t> pages_;  // [shape]: of a row's copies, the most so far, and a power of two
  int64_t page_bytes_ = 0;      // of a page of copies, in any layer
  uint64_t capacities_ = 1;
  Buffer copies_;    // [rows of a wave][pages]
  Buffer gathered_;  // cache::GatheredPages [rows of a wave]
  Buffer page_ids_;  // kernels::cuda::PageIds [rows of a wave][pages]
};

}  // namespace kvanta::attention
