// Partition of a step's attention on a GPU: tiles of up to 16 query rows of one page and KV head, and tasks of KV
// splits of a tile. Results do not depend on the partition (kernels/attention/cuda/attention_block.h).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/work_list.h"
#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::attention {

// Up to this many KV splits, a tile's are divided among tasks; beyond, a tile is one task, which bounds the memory of
// split results.
inline constexpr int64_t kMaxParallelSplits = 16384;

struct GpuPartition {
  int64_t max_parallel_splits = kMaxParallelSplits;
  int64_t multiprocessors = 1;
};

struct GpuSchedule {
  std::vector<kernels::cuda::QueryTile> tiles;
  std::vector<kernels::cuda::SplitTask> tasks;  // longest first
  int64_t result_rows = 0;                      // rows of split results
  int32_t tile_rows = 0;                        // of the tile with the most query rows
};

// Tiles of a sequence with one new token, and their query rows (a bound).
int64_t TilesPerToken(const WorkShape& shape);
int32_t TileRowsOfToken(const WorkShape& shape);

// `first_pages`: index of each sequence's first page in the step's page table. Overwrites `schedule`, reusing its
// memory.
void MakeGpuSchedule(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
                     const GpuPartition& partition, GpuSchedule& schedule);

}  // namespace kvanta::attention
