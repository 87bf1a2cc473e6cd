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
                                    .first_head = static_cast<int16_t>(kv_head * shape.Group() + head),
                                    .sequence_tokens = static_cast<int32_t>(sequence.End())});
        }
        first = last;
      }
    }
  }
}

constexpr int32_t kMinGroup = 3;  // a group of two takes a block as long as its tiles take two

// Tiles of a page and KV head, in groups of up to kGroupTiles; where fewer than kMinGroup are left, single tiles.
void MakeRuns(int page_size, bool makes_groups, GpuSchedule& schedule) {
  const auto follows = [&](const Tile& tile, const Tile& first) {
    return tile.page_table == first.page_table && tile.kv_head == first.kv_head &&
           tile.first_position / page_size == first.first_position / page_size;
  };
  const std::vector<Tile>& tiles = schedule.tiles;
  const auto count = static_cast<int32_t>(tiles.size());
  for (int32_t first = 0; first < count;) {
    int32_t end = first + 1;
    while (makes_groups && end < count && end - first < kernels::cuda::kGroupTiles &&
           follows(tiles[static_cast<size_t>(end)], tiles[static_cast<size_t>(first)])) {
      ++end;
    }
    if (end - first >= kMinGroup) {
      schedule.groups.runs.push_back({first, end - first});
    } else {
      for (int32_t tile = first; tile < end; ++tile) schedule.single.runs.push_back({tile, 1});
    }
    first = end;
  }
}

// Divides runs of tiles into as many work items of about equal cost as blocks run at once. Costs are in chunks that a
// warp of the block takes.
class Division {
 public:
  // split_tokens: tokens of a KV split that a warp takes.
  Division(const WorkShape& shape, int64_t blocks, int64_t split_tokens, int64_t max_result_rows, GpuSchedule& schedule,
           GpuTasks& list)
      : shape_(shape),
        blocks_(std::max<int64_t>(blocks, 1)),
        split_tokens_(split_tokens),
        max_result_rows_(max_result_rows),
        schedule_(schedule),
        list_(list) {
    for (const TileRun& run : list.runs) {
      const Splits splits = SplitsOf(run);
      remaining_ += Cost(splits, splits.first, splits.last);
    }
    left_ = std::max<int64_t>(remaining_ / blocks_, 1);
  }

  void Run() {
    list_.work_indptr.push_back(0);
    // Blocks are at adjacent tiles at any time: those of a prompt read the same pages, which then are in the L2 cache.
    const auto count = static_cast<int64_t>(list_.runs.size());
    for (int64_t block = 0; block < blocks_; ++block) {
      for (int64_t run = block; run < count; run += blocks_) AddTasks(list_.runs[static_cast<size_t>(run)]);
    }
    while (std::ssize(list_.work_indptr) <= blocks_) EndItem(0);
  }

 private:
  static constexpr int64_t kTaskCost = 2;  // its queries

  // KV splits [first, last) of a run, and the positions that it sees.
  struct Splits {
    int32_t first, last;
    int64_t end;
  };

  Splits SplitsOf(const TileRun& run) const {
    const Tile& first = schedule_.tiles[static_cast<size_t>(run.tile)];
    const Tile& last = schedule_.tiles[static_cast<size_t>(run.tile + run.tiles - 1)];
    const int32_t end = shape_.visibility.Last(last.first_position + last.tokens - 1, last.sequence_tokens) + 1;
    return {shape_.visibility.First(first.first_position) / kSplitTokens, (end - 1) / kSplitTokens + 1, end};
  }
  int64_t SplitCost() const { return 4 + split_tokens_ / kernels::cuda::kChunkTokens; }  // at most
  // A split is cheaper only with fewer tokens than its first warp, or a group's warps, can take.
  int64_t Cost(const Splits& splits, int64_t first, int64_t last) const {
    const int64_t tokens = splits.end - (last - 1) * kSplitTokens;  // tokens of the last split
    const int64_t chunks_less = tokens < split_tokens_ ? (split_tokens_ - tokens) / kernels::cuda::kChunkTokens : 0;
    return kTaskCost + (last - first) * SplitCost() - chunks_less;
  }

  // The last work item takes everything.
  bool IsLast() const { return std::ssize(list_.work_indptr) == blocks_; }
  // Divides the remaining cost among the other items, with `task` for queries that are loaded again.
  void EndItem(int64_t task) {
    list_.work_indptr.push_back(static_cast<int32_t>(list_.tasks.size()));
    const int64_t items = blocks_ - std::ssize(list_.work_indptr) + 1;
    if (items > 0) left_ = CeilDiv(remaining_, items) + task;
  }

  void AddTasks(const TileRun& run) {
    const Splits splits = SplitsOf(run);
    const int64_t result_rows = int64_t{splits.last - splits.first} * run.tiles * schedule_.tile_rows;
    const bool divides = schedule_.result_rows + result_rows <= max_result_rows_;
    const size_t first_task = list_.tasks.size();
    for (int32_t split = splits.first; split < splits.last;) {
      const bool is_first = split == splits.first;
      const int64_t cost = Cost(splits, split, splits.last);
      int32_t end = splits.last;
      if (!IsLast() && cost > left_ + SplitCost() / 2) {  // rounded to whole splits, or runs
        const int64_t all = splits.last - split;
        const int64_t fits = !divides ? (left_ >= cost / 2 ? all : 0)
                                      : std::max<int64_t>(left_ - kTaskCost + SplitCost() / 2, 0) / SplitCost();
        if (fits == 0) {
          EndItem(is_first ? 0 : kTaskCost);
          continue;
        }
        end = split + static_cast<int32_t>(std::min(fits, all));
      }
      list_.tasks.push_back({.tile = run.tile, .tiles = run.tiles, .first_split = split, .last_split = end});
      const int64_t taken = Cost(splits, split, end);
      left_ -= taken;
      remaining_ -= is_first ? taken : taken - kTaskCost;
      split = end;
    }
    SetResults(run, splits.first, first_task);
  }

  // Rows of the results of the run's tasks: one for each split, or for all.
  void SetResults(const TileRun& run, int32_t first_split, size_t first_task) {
    const bool whole = list_.tasks.size() == first_task + 1;
    const auto first_row = static_cast<int32_t>(schedule_.result_rows);
    for (int32_t i = 0; i < run.tiles; ++i) {
      Tile& tile = schedule_.tiles[static_cast<size_t>(run.tile) + static_cast<size_t>(i)];
      tile.result_row = static_cast<int32_t>(schedule_.result_rows);
      tile.num_tasks = static_cast<int32_t>(list_.tasks.size() - first_task);
      tile.num_results = whole ? 1 : list_.tasks.back().last_split - first_split;
      schedule_.result_rows += int64_t{tile.num_results} * schedule_.tile_rows;
    }
    for (size_t i = first_task; i < list_.tasks.size(); ++i) {
      SplitTask& task = list_.tasks[i];
      task.result_rows = whole ? 0 : schedule_.tile_rows;
      task.result_row = first_row + (task.first_split - first_split) * task.result_rows;
    }
  }

  const WorkShape& shape_;
  const int64_t blocks_;
  const int64_t split_tokens_;
  const int64_t max_result_rows_;
  GpuSchedule& schedule_;
  GpuTasks& list_;
  int64_t remaining_ = 0;  // cost of the runs that are left, without that of cuts
  int64_t left_ = 0;       // cost that the present work item still takes
};

}  // namespace

// Wide heads leave shared memory for few rows, except in the kernels for latents.
int32_t MaxTileRows(const WorkShape& shape) {
  const bool is_wide = shape.head_dim > kernels::cuda::kMaxTiledHeadDim && !shape.is_latent;
  return is_wide ? kernels::cuda::kRowsPerMma : kQueryRows;
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
  for (GpuTasks* list : {&schedule.single, &schedule.groups}) {
    list->runs.clear();
    list->tasks.clear();
    list->work_indptr.clear();
  }
  schedule.result_rows = 0;
  AddTiles(shape, batch, first_pages, page_size, schedule);
  schedule.tile_rows = 0;
  for (const Tile& tile : schedule.tiles) {
    schedule.tile_rows = std::max(schedule.tile_rows, tile.tokens * tile.heads);
  }
  const bool large = schedule.tile_rows > kernels::cuda::kRowsPerMma;
  MakeRuns(page_size, large && partition.group_blocks > 0, schedule);
  Division(shape, large ? partition.large_blocks : partition.small_blocks, kernels::cuda::kQuarterTokens,
           partition.max_result_rows, schedule, schedule.single)
      .Run();
  if (schedule.groups.runs.empty()) return;
  Division(shape, partition.group_blocks, kSplitTokens, partition.max_result_rows, schedule, schedule.groups).Run();
}

ScheduleLists ListsOfTokens(const WorkShape& shape, const GpuPartition& partition) {
  const int64_t tiles = CeilDiv(shape.Group(), MaxTileRows(shape)), left = tiles % kernels::cuda::kGroupTiles;
  if (TileRowsOfToken(shape) <= kernels::cuda::kRowsPerMma || partition.group_blocks == 0) return {};
  return {.single = left > 0 && left < kMinGroup, .groups = tiles >= kMinGroup};
}

ScheduleLists ListsOf(const GpuSchedule& schedule, const WorkShape& shape, const GpuPartition& partition,
                      int64_t bucket) {
  if (bucket != 0) return ListsOfTokens(shape, partition);
  return {.single = !schedule.single.tasks.empty(), .groups = !schedule.groups.tasks.empty()};
}

void SetMetadata(const ScheduleLists& lists, const kernels::cuda::AttentionMetadata* metadata,
                 kernels::cuda::AttentionParams& params) {
  params.metadata = metadata;
  params.group_metadata = lists.groups ? metadata + 1 : nullptr;
  params.has_tiles = lists.single;
}

void AddSchedule(const GpuSchedule& schedule, StepMetadata& metadata, std::vector<size_t>& offsets) {
  offsets.push_back(metadata.Add(schedule.tiles));
  for (const GpuTasks* list : {&schedule.single, &schedule.groups}) {
    offsets.push_back(metadata.Add(list->tasks));
    offsets.push_back(metadata.Add(list->work_indptr));
  }
}

void WriteSchedule(const GpuSchedule& schedule, const size_t* offsets, const kernels::cuda::PageIds* pages,
                   const int32_t* first_pages, const GpuSplitResults& results, size_t at, StepMetadata& metadata) {
  const uint8_t* const base = metadata.Address();
  kernels::cuda::AttentionMetadata own{.pages = pages,
                                       .first_pages = first_pages,
                                       .tiles = reinterpret_cast<const kernels::cuda::QueryTile*>(base + offsets[0]),
                                       .tile_count = static_cast<int32_t>(schedule.tiles.size()),
                                       .result_stride = schedule.tile_rows};
  results.Set(own);
  const auto write = [&](const GpuTasks& list, const size_t* arrays, size_t to) {
    own.tasks = reinterpret_cast<const kernels::cuda::SplitTask*>(base + arrays[0]);
    own.work_indptr = reinterpret_cast<const int32_t*>(base + arrays[1]);
    own.work_count = list.WorkItems();
    metadata.Write(to, own);
  };
  write(schedule.single, offsets + 1, at);
  write(schedule.groups, offsets + 3, at + sizeof(own));
}

void WriteSchedules(const std::vector<GpuSchedule>& schedules, const std::vector<size_t>& offsets,
                    const kernels::cuda::PageIds* pages, const GpuSplitResults& results, size_t at,
                    StepMetadata& metadata) {
  for (size_t i = 0; i < schedules.size(); ++i) {
    WriteSchedule(schedules[i], offsets.data() + kScheduleArrays * i, pages, nullptr, results, at + i * kScheduleBytes,
                  metadata);
  }
}

}  // namespace kvanta::attention
