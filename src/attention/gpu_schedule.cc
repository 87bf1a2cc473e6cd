#include "attention/gpu_schedule.h"

#include <algorithm>

#include "base/math.h"

namespace kvanta::attention {
namespace {

using kernels::cuda::kQueryRows;
using kernels::cuda::SplitTask;
using Tile = kernels::cuda::QueryTile;

static_assert(kernels::cuda::kSplitTokens == kSplitTokens);

void AddTiles(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
              GpuSchedule& schedule) {
  const int max_rows = MaxTileRows(shape);
  const int heads = std::min(shape.Group(), max_rows);  // per tile
  const int tile_tokens = shape.Group() > max_rows ? 1 : max_rows / shape.Group();
  for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      const SequenceRows& sequence = batch.sequences[s];
      for (int64_t first = sequence.span.start; first < sequence.End();) {
        const int64_t page_end = (first / page_size + 1) * page_size;
        const int64_t last = std::min({sequence.End(), page_end, first + tile_tokens});
        for (int head = 0; head < shape.Group(); head += heads) {
          schedule.tiles.push_back({.page_table = first_pages[s],
                                    .first_position = static_cast<int32_t>(first),
                                    .row = static_cast<int32_t>(sequence.first_row + first - sequence.span.start),
                                    .tokens = static_cast<int16_t>(last - first),
                                    .heads = static_cast<int16_t>(std::min(heads, shape.Group() - head)),
                                    .kv_head = static_cast<int16_t>(kv_head),
                                    .first_head = static_cast<int16_t>(kv_head * shape.Group() + head)});
        }
        first = last;
      }
    }
  }
}

// Divides the tiles into as many work items of about equal cost as blocks run at once. Costs are in chunks
// that a warp of the block takes.
class Division {
 public:
  Division(const WorkShape& shape, const GpuPartition& partition, GpuSchedule& schedule)
      : shape_(shape), partition_(partition), schedule_(schedule) {
    const bool large = schedule.tile_rows > kernels::cuda::kRowsPerMma;
    blocks_ = std::max<int64_t>(large ? partition.large_blocks : partition.small_blocks, 1);
    for (const Tile& tile : schedule.tiles) {
      const Splits splits = SplitsOf(tile);
      remaining_ += Cost(tile, splits.first, splits.last);
    }
    left_ = std::max<int64_t>(remaining_ / blocks_, 1);
  }

  void Run() {
    schedule_.work_indptr.push_back(0);
    // Blocks are at adjacent tiles at any time: those of a prompt read the same pages, which then are in the L2 cache.
    const int64_t tiles = std::ssize(schedule_.tiles);
    for (int64_t block = 0; block < blocks_; ++block) {
      for (int64_t tile = block; tile < tiles; tile += blocks_) AddTasks(static_cast<int32_t>(tile));
    }
    while (std::ssize(schedule_.work_indptr) <= blocks_) EndItem(0);
  }

 private:
  static constexpr int64_t kTaskCost = 2;                                                                 // its queries
  static constexpr int64_t kSplitCost = 4 + kernels::cuda::kQuarterTokens / kernels::cuda::kChunkTokens;  // at most

  // KV splits [first, last) of a tile.
  struct Splits {
    int32_t first, last;
  };

  Splits SplitsOf(const Tile& tile) const {
    return {shape_.visibility.First(tile.first_position) / kSplitTokens,
            (tile.first_position + tile.tokens - 1) / kSplitTokens + 1};
  }
  // A split's warps take quarters, so only few tokens make it cheaper.
  static int64_t Cost(const Tile& tile, int64_t first, int64_t last) {
    const int64_t tokens = tile.first_position + tile.tokens - (last - 1) * kSplitTokens;  // tokens of the last split
    const int64_t chunks_less = tokens < kernels::cuda::kQuarterTokens
                                    ? (kernels::cuda::kQuarterTokens - tokens) / kernels::cuda::kChunkTokens
                                    : 0;
    return kTaskCost + (last - first) * kSplitCost - chunks_less;
  }

  // The last work item takes everything.
  bool IsLast() const { return std::ssize(schedule_.work_indptr) == blocks_; }
  // Divides the remaining cost among the other items, with `task` for queries that are loaded again.
  void EndItem(int64_t task) {
    schedule_.work_indptr.push_back(static_cast<int32_t>(schedule_.tasks.size()));
    const int64_t items = blocks_ - std::ssize(schedule_.work_indptr) + 1;
    if (items > 0) left_ = CeilDiv(remaining_, items) + task;
  }

  void AddTasks(int32_t index) {
    Tile& tile = schedule_.tiles[static_cast<size_t>(index)];
    const Splits splits = SplitsOf(tile);
    const bool divides =
        schedule_.result_rows + int64_t{splits.last - splits.first} * schedule_.tile_rows <= partition_.max_result_rows;
    const size_t first_task = schedule_.tasks.size();
    for (int32_t split = splits.first; split < splits.last;) {
      const bool is_first = split == splits.first;
      const int64_t cost = Cost(tile, split, splits.last);
      int32_t end = splits.last;
      if (!IsLast() && cost > left_ + kSplitCost / 2) {  // rounded to whole splits, or tiles
        const int64_t all = splits.last - split;
        const int64_t fits = !divides ? (left_ >= cost / 2 ? all : 0)
                                      : std::max<int64_t>(left_ - kTaskCost + kSplitCost / 2, 0) / kSplitCost;
        if (fits == 0) {
          EndItem(is_first ? 0 : kTaskCost);
          continue;
        }
        end = split + static_cast<int32_t>(std::min(fits, all));
      }
      schedule_.tasks.push_back({.tile = index, .first_split = split, .last_split = end});
      const int64_t taken = Cost(tile, split, end);
      left_ -= taken;
      remaining_ -= is_first ? taken : taken - kTaskCost;
      split = end;
    }
    SetResults(tile, splits.first, first_task);
  }

  // Rows of the results of the tile's tasks: one for each split, or for all.
  void SetResults(Tile& tile, int32_t first_split, size_t first_task) {
    const bool whole = schedule_.tasks.size() == first_task + 1;
    tile.result_row = static_cast<int32_t>(schedule_.result_rows);
    tile.num_results = whole ? 1 : schedule_.tasks.back().last_split - first_split;
    for (size_t i = first_task; i < schedule_.tasks.size(); ++i) {
      SplitTask& task = schedule_.tasks[i];
      task.result_rows = whole ? 0 : schedule_.tile_rows;
      task.result_row = tile.result_row + (task.first_split - first_split) * task.result_rows;
    }
    schedule_.result_rows += int64_t{tile.num_results} * schedule_.tile_rows;
  }

  const WorkShape& shape_;
  const GpuPartition& partition_;
  GpuSchedule& schedule_;
  int64_t blocks_ = 1;
  int64_t remaining_ = 0;  // cost of the tiles that are left, without that of cuts
  int64_t left_ = 0;       // cost that the present work item still takes
};

}  // namespace

// Wide heads leave shared memory for few rows.
int32_t MaxTileRows(const WorkShape& shape) {
  return shape.head_dim > kernels::cuda::kMaxTiledHeadDim ? kernels::cuda::kRowsPerMma : kQueryRows;
}

int64_t TilesPerToken(const WorkShape& shape) {
  return shape.kv_heads * CeilDiv(shape.Group(), MaxTileRows(shape));
}

int32_t TileRowsOfToken(const WorkShape& shape) {
  return std::min(shape.Group(), MaxTileRows(shape));
}

void MakeGpuSchedule(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
                     const GpuPartition& partition, GpuSchedule& schedule) {
  schedule.tiles.clear();
  schedule.tasks.clear();
  schedule.work_indptr.clear();
  schedule.result_rows = 0;
  AddTiles(shape, batch, first_pages, page_size, schedule);
  schedule.tile_rows = 0;
  for (const Tile& tile : schedule.tiles) {
    schedule.tile_rows = std::max(schedule.tile_rows, tile.tokens * tile.heads);
  }
  Division(shape, partition, schedule).Run();
}

void AddSchedule(const GpuSchedule& schedule, StepMetadata& metadata, std::vector<size_t>& offsets) {
  offsets.push_back(metadata.Add(schedule.tiles));
  offsets.push_back(metadata.Add(schedule.tasks));
  offsets.push_back(metadata.Add(schedule.work_indptr));
}

kernels::cuda::AttentionMetadata MetadataOf(const GpuSchedule& schedule, const uint8_t* base, const size_t* offsets) {
  return {.tiles = reinterpret_cast<const Tile*>(base + offsets[0]),
          .tasks = reinterpret_cast<const kernels::cuda::SplitTask*>(base + offsets[1]),
          .work_indptr = reinterpret_cast<const int32_t*>(base + offsets[2]),
          .tile_count = static_cast<int32_t>(schedule.tiles.size()),
          .work_count = static_cast<int32_t>(schedule.work_indptr.size()) - 1,
          .result_stride = schedule.tile_rows};
}

}  // namespace kvanta::attention
