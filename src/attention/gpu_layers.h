// Kernel arguments of a layer on a GPU, except those that change between steps.
#pragma once

#include <string>
#include <vector>

#include "attention/backend.h"
#include "kernels/attention/cuda/attention_params.h"
#include "kernels/cuda/cuda_context.h"

namespace kvanta::attention {

// One cell per KV head, as written by Append.
struct GpuCell {
  int kernel = -1;
  int exact_kernel = -1;  // writes exact records
  int first_channel = 0;  // in the rows of k or v
  kernels::cuda::AppendParams params;
};

struct GpuLayer {
  std::vector<GpuCell> cells;  // K; V, unless it shares K's cell; K's unquantized channels, if any
  int pair_kernel = -1;        // of two cells, for pages that close
  bool exact_open = false;
  int slots = 0;          // whose rows Append writes (gpu_plan.h)
  size_t compressed = 0;  // of a layer whose K and V are one row: its CompressedShape
  int attend_kernel = -1;
  kernels::cuda::AttentionParams attention;
};

// True if launches of AppendCells can transform queries and keys (HeadRows).
bool TransformsHeads(const GpuLayer& layer) noexcept;

// Rows of k and v of a step, and the pages that close in it.
struct AppendStep {
  HeadRows rows;
  const kernels::cuda::SlotMapping* slots = nullptr;
  int32_t max_slots = 0;
  const kernels::cuda::SlotMapping* closed_slots = nullptr;
  int32_t max_closed_slots = 0;  // 0: none
  bool is_decode = false;        // a token of each sequence
};
// Writes a layer's cells, two of one encoder by one launch, and transforms queries where rows have such. In decode
// steps pages are closed by the same launches, else by others after them.
void AppendCells(const GpuLayer& layer, const AppendStep& step, kernels::CudaContext& gpu) noexcept;

// Packs the outputs of attention for the linear layer that reads them, if it takes that: parts of rows, or, with
// `tiles_per_row`, in decode steps, whole rows.
void PackOutputs(const kernels::Linear* reader, int64_t rows, int64_t tiles_per_row,
                 kernels::cuda::AttentionParams& params) noexcept;

SideCounts CountsOf(const kernels::cuda::AppendSums& sums) noexcept;

// The format or pair of formats that no CUDA kernel writes or reads, or "". Needs no GPU.
std::string FindUnsupported(const formats::LayerScheme& scheme);

// Builds GpuLayers and owns a configuration's constants in device memory.
class GpuLayerBuilder {
 public:
  GpuLayerBuilder(const cache::PagePool& pool, const BackendConfig& config) : pool_(pool), config_(config) {}

  // sums: [2], K and V. Throws InputError, naming `gpu`, if no kernel supports the layer.
  GpuLayer Build(size_t index, kernels::cuda::AppendSums* sums, const std::string& gpu);

 private:
  GpuCell BuildSide(size_t index, bool is_key);
  GpuCell BuildUnquantized(size_t index, const kernels::cuda::AppendParams& k) const;
  template <class T>
  const T* Upload(const std::vector<T>& values);

  const cache::PagePool& pool_;
  const BackendConfig& config_;
  std::vector<Buffer> constants_;
};

}  // namespace kvanta::attention
