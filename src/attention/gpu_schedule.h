// How a step's attention is cut into pieces for a GPU: tiles of up to 16 query rows of one page and KV head, and tasks
// of runs of a tile. What a row gets does not depend on the cut (kernels/cuda/attention_kernel.h).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/work_list.h"
#include "kernels/attention/cuda/launch.h"

namespace kvanta::attention {

// Up to this many tasks, each run of a tile is one: what keeps a GPU busy, with bounded memory for partial results.
inline constexpr int64_t kMaxParallelSplits = 16384;

struct GpuSchedule {
  std::vector<kernels::cuda::QueryTile> tiles;
  std::vector<kernels::cuda::SplitTask> tasks;  // costly ones first
  int64_t slots = 0;                            // rows of partial results
};

// Tiles of a sequence that has one new token.
int64_t TilesOfToken(const WorkShape& shape);

// `first_pages`: of each sequence, where its pages begin in the step's table. Fills `work`, reusing its memory.
void MakeGpuSchedule(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
                     int64_t max_parallel_splits, GpuSchedule& work);

}  // namespace kvanta::attention
