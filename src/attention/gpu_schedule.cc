#include "attention/gpu_schedule.h"

#include <algorithm>

#include "base/math.h"

namespace kvanta::attention {
namespace {

using kernels::cuda::kQueryRows;

static_assert(kernels::cuda::kSplitTokens == kSplitTokens);

struct SplitRange {
  int32_t first;
  int32_t last;

  int32_t Count() const { return last - first; }
};
SplitRange SplitsOf(const kernels::cuda::QueryTile& tile, const WorkShape& shape) {
  return {shape.visibility.First(tile.first_position) / kSplitTokens,
          (tile.first_position + tile.tokens - 1) / kSplitTokens + 1};
}

void AddTiles(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
              GpuSchedule& schedule) {
  const int heads = std::min(shape.Group(), kQueryRows);  // per tile
  const int tile_tokens = shape.Group() > kQueryRows ? 1 : kQueryRows / shape.Group();
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

// Splits of a task: queries are loaded once per task, at about a tenth of a split's cost, but blocks that are resident
// at once should end at once.
int32_t TaskSplits(int64_t splits, int64_t multiprocessors) {
  constexpr int64_t kBlocksPerSm = 4;
  int32_t best = 1;
  int64_t min_cost = 0;
  for (int32_t count = 1; count <= 8; count *= 2) {
    const int64_t rounds = CeilDiv(CeilDiv(splits, int64_t{count}), kBlocksPerSm * multiprocessors);
    const int64_t cost = rounds * (10 * count + 1);
    if (min_cost != 0 && cost > min_cost) continue;
    min_cost = cost;
    best = count;
  }
  return best;
}

}  // namespace

int64_t TilesPerToken(const WorkShape& shape) {
  return shape.kv_heads * CeilDiv(shape.Group(), kQueryRows);
}

int32_t TileRowsOfToken(const WorkShape& shape) {
  return std::min(shape.Group(), kQueryRows);
}

void MakeGpuSchedule(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
                     const GpuPartition& partition, GpuSchedule& schedule) {
  schedule.tiles.clear();
  schedule.tasks.clear();
  schedule.result_rows = 0;
  AddTiles(shape, batch, first_pages, page_size, schedule);
  schedule.tile_rows = 0;
  int64_t splits = 0;
  for (const kernels::cuda::QueryTile& tile : schedule.tiles) {
    splits += SplitsOf(tile, shape).Count();
    schedule.tile_rows = std::max(schedule.tile_rows, tile.tokens * tile.heads);
  }
  const bool parallel = splits <= partition.max_parallel_splits;
  const int32_t task_splits = TaskSplits(splits, partition.multiprocessors);
  // Later tiles of a chunk see more tokens: longest first.
  for (size_t i = schedule.tiles.size(); i-- > 0;) {
    kernels::cuda::QueryTile& tile = schedule.tiles[i];
    const SplitRange range = SplitsOf(tile, shape);
    tile.result_row = static_cast<int32_t>(schedule.result_rows);
    tile.num_results = parallel ? range.Count() : 1;
    const int32_t step = parallel ? task_splits : range.Count();
    for (int32_t split = range.first; split < range.last; split += step) {
      schedule.tasks.push_back({.tile = static_cast<int32_t>(i),
                                .result_row = tile.result_row + (split - range.first) * kQueryRows,
                                .result_rows = parallel ? kQueryRows : 0,
                                .first_split = split,
                                .last_split = std::min(split + step, range.last)});
    }
    schedule.result_rows += int64_t{tile.num_results} * kQueryRows;
  }
}

}  // namespace kvanta::attention
