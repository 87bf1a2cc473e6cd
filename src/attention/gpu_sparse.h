// Sparse attention on a GPU (docs/adr/0088): a step's rows that attend to chosen tokens, their scores, choices and
// copies of the chosen cells, in waves of as many rows as their memory allows. A row's bits do not depend on its wave.
// Compressed entries are chosen likewise, and copied elsewhere (gpu_compressed.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/gpu_layers.h"
#include "attention/gpu_schedule.h"
#include "attention/step_metadata.h"
#include "kernels/attention/cuda/sparse_ops.h"

namespace kvanta::attention {

// Bounds of a wave.
inline constexpr int64_t kCopyBytes = int64_t{64} << 20;
inline constexpr int64_t kMaxWaveRows = 256;

// Layers whose attention to copies shares a schedule.
struct GpuSparseShape {
  WorkShape work;
  GpuPartition partition;
};

// A step's sparse rows.
struct GpuSparsePlan {
  Batch dense;  // the rows that attend to all they see
  std::vector<kernels::cuda::SparseRow> rows;
  int64_t bucket = 0;
  int64_t max_rows = 0;  // of any step of the plan's bucket
  int64_t waves = 0;
  int64_t score_stride = 0;            // tokens that a row sees, at most
  std::vector<GpuSchedule> schedules;  // [wave][shape]
  Buffer scores, positions;            // SparseStep's
  size_t header = 0;                   // offset in the metadata: SparseStep, then schedules [wave][shape]
  size_t rows_offset = 0;
  std::vector<size_t> schedule_offsets;
  mutable std::vector<int32_t> read;  // positions of a row, for Selected

  // The index among `rows` of a row of the batch; -1: it attends to all it sees.
  int32_t IndexOf(int64_t row) const noexcept;
};

class GpuSparse {
 public:
  // All arguments outlive it.
  GpuSparse(const formats::CacheLayout& layout, const std::vector<AttentionSpec>& layers,
            std::vector<GpuSparseShape> shapes, int64_t max_result_rows, Device& device);

  // The index among `shapes` of a layer's.
  size_t ShapeOf(const WorkShape& work) const noexcept;
  // The shape of a plan's schedule.
  const GpuSparseShape& ShapeAt(size_t schedule) const noexcept { return shapes_[schedule % shapes_.size()]; }

  // Finds the sparse rows of a step (of a bucket, or 0) and schedules them.
  void MakePlan(const Batch& batch, int64_t bucket, GpuSparsePlan& plan);
  size_t HeaderBytes(const GpuSparsePlan& plan) const noexcept;
  // Adds the plan's arrays, and, after StepMetadata::Reserve, writes its header.
  void AddArrays(StepMetadata& metadata, GpuSparsePlan& plan) const;
  void WriteHeader(StepMetadata& metadata, const GpuSparsePlan& plan, const GpuSplitResults& results) const;

  // Backend::Select by `keys`, a layer's arguments with q and metadata.
  void Select(const GpuSparsePlan& plan, const StepMetadata& metadata, const kernels::cuda::AttentionParams& keys,
              const float* weights, kernels::CudaContext& gpu) const noexcept;
  // Attention of the sparse rows: `params` are a layer's, with q, out and metadata.
  void Run(const GpuSparsePlan& plan, const StepMetadata& metadata, const formats::LayerScheme& scheme, size_t shape,
           const kernels::cuda::AttentionParams& params, int kernel, kernels::CudaContext& gpu) const noexcept;
  // Positions chosen for a row of the batch; empty: all that it sees. Waits for the GPU.
  std::span<const int32_t> Selected(const GpuSparsePlan& plan, int64_t row) const noexcept;

 private:
  kernels::cuda::SparseWave WaveOf(const GpuSparsePlan& plan, const StepMetadata& metadata,
                                   int64_t wave) const noexcept;

  const std::vector<GpuSparseShape> shapes_;
  Device& device_;
  int top_k_ = 0;
  int page_size_ = 0;
  int row_tokens_ = 1;                                         // of keys
  int32_t pages_ = 0, quantized_pages_ = 0, exact_pages_ = 0;  // of a row's copies, at most
  int64_t wave_rows_ = 1;
  Buffer quantized_, exact_;  // records of copies, [rows of a wave][pages]
  Buffer gathered_;           // cache::GatheredPages [rows of a wave]
  Buffer page_ids_;           // kernels::cuda::PageIds [rows of a wave][pages_]
};

}  // namespace kvanta::attention
