// Partition of a step's attention on a GPU: tiles of up to 16 query rows of one page and KV head, and tasks of
// consecutive KV splits of a tile, or of a group of adjacent tiles of a page, in work items of about equal cost.
// Results do not depend on the partition (kernels/attention/cuda/attention_block.h, group_block.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/step_metadata.h"
#include "attention/work_list.h"
#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::attention {

// Rows of split results: tiles are divided among tasks up to this many, which bounds their memory.
inline constexpr int64_t kMaxResultRows = 1 << 18;

struct GpuPartition {
  // Blocks that run at once, where tiles have up to 8 query rows and where some have more.
  int64_t small_blocks = 1;
  int64_t large_blocks = 1;
  int64_t group_blocks = 0;  // the same for tile groups; 0: none are made
  int64_t max_result_rows = kMaxResultRows;

  bool operator==(const GpuPartition&) const = default;
};

// Adjacent tiles that a task has together.
struct TileRun {
  int32_t tile = 0;  // the first
  int32_t tiles = 1;
};

// Tasks of work items, as in AttentionMetadata.
struct GpuTasks {
  std::vector<TileRun> runs;                    // what the tasks divide
  std::vector<kernels::cuda::SplitTask> tasks;  // a tile's or group's are adjacent, in order of splits
  std::vector<int32_t> work_indptr;

  int32_t WorkItems() const { return work_indptr.empty() ? 0 : static_cast<int32_t>(work_indptr.size()) - 1; }
};

struct GpuSchedule {
  std::vector<kernels::cuda::QueryTile> tiles;
  GpuTasks single;          // of tiles that are in no group
  GpuTasks groups;          // of tile groups
  int64_t result_rows = 0;  // rows of split results
  int32_t tile_rows = 0;    // query rows of the largest tile, and the stride from one result to the next
};

// Device memory of split results, which the schedules of a step share.
class GpuSplitResults {
 public:
  // Plans for a schedule of layers of `head_dim` channels.
  void Include(const GpuSchedule& schedule, int64_t head_dim) {
    rows_ = std::max(rows_, schedule.result_rows);
    floats_ = std::max(floats_, schedule.result_rows * head_dim);
    tiles_ = std::max(tiles_, static_cast<int64_t>(schedule.tiles.size()));
  }
  void Reserve(Device& device, int64_t rows) {
    Grow(device, out_, floats_ * int64_t{sizeof(float)});
    Grow(device, state_, 2 * rows_ * int64_t{sizeof(float)});
    Grow(device, finished_tasks_, tiles_ * int64_t{sizeof(uint32_t)});
    Grow(device, finished_tiles_, rows * int64_t{sizeof(uint32_t)});
  }
  // Sets their addresses.
  void Set(kernels::cuda::AttentionMetadata& metadata) const {
    metadata.split_out = out_.as<float>();
    metadata.split_state = state_.as<float>();
    metadata.finished_tasks = finished_tasks_.as<uint32_t>();
    metadata.finished_tiles = finished_tiles_.as<uint32_t>();
  }

 private:
  int64_t rows_ = 0, floats_ = 0, tiles_ = 0;
  Buffer out_, state_, finished_tasks_, finished_tiles_;
};

// Query rows of the largest tile.
int32_t MaxTileRows(const WorkShape& shape);
// Tiles of a sequence with one new token, and their query rows (a bound).
int64_t TilesPerToken(const WorkShape& shape);
int32_t TileRowsOfToken(const WorkShape& shape);

// `first_pages`: index of each sequence's first page in the step's page table. Overwrites `schedule`, reusing its
// memory.
void MakeGpuSchedule(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
                     const GpuPartition& partition, GpuSchedule& schedule);

// The lists of a schedule that have tasks.
struct ScheduleLists {
  bool single = true;
  bool groups = false;
};
// The lists of any step of sequences with one new token each, which captured launches serve.
ScheduleLists ListsOfTokens(const WorkShape& shape, const GpuPartition& partition);
// The lists of a step; `bucket` != 0: of any step of the bucket.
ScheduleLists ListsOf(const GpuSchedule& schedule, const WorkShape& shape, const GpuPartition& partition,
                      int64_t bucket);
// Sets the metadata of a schedule's lists, which are at `metadata`: of single tiles, then of groups.
void SetMetadata(const ScheduleLists& lists, const kernels::cuda::AttentionMetadata* metadata,
                 kernels::cuda::AttentionParams& params);

// The index of a value, which is added if it is not there.
template <class T>
size_t FindOrAdd(const T& value, std::vector<T>& values) {
  const auto found = std::find(values.begin(), values.end(), value);
  const auto index = static_cast<size_t>(found - values.begin());
  if (found == values.end()) values.push_back(value);
  return index;
}

// Adds a schedule's arrays, whose offsets are appended: tiles, then tasks and work items of single tiles and of groups.
inline constexpr size_t kScheduleArrays = 5;
void AddSchedule(const GpuSchedule& schedule, StepMetadata& metadata, std::vector<size_t>& offsets);
// Metadata of a schedule in a header: of single tiles, then of groups.
inline constexpr size_t kScheduleBytes = 2 * sizeof(kernels::cuda::AttentionMetadata);
// Writes it at `at`. The schedule's arrays are at these offsets; pages: of the step; first_pages: or null.
void WriteSchedule(const GpuSchedule& schedule, const size_t* offsets, const kernels::cuda::PageIds* pages,
                   const int32_t* first_pages, const GpuSplitResults& results, size_t at, StepMetadata& metadata);
// The same for schedules, added one after the other, with the same pages: from `at` on.
void WriteSchedules(const std::vector<GpuSchedule>& schedules, const std::vector<size_t>& offsets,
                    const kernels::cuda::PageIds* pages, const GpuSplitResults& results, size_t at,
                    StepMetadata& metadata);

}  // namespace kvanta::attention
