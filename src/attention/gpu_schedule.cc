#include "attention/gpu_schedule.h"

#include <algorithm>

namespace kvanta::attention {
namespace {

using kernels::cuda::kQueryRows;
using kernels::cuda::QueryTile;

static_assert(kernels::cuda::kSplitTokens == kSplitTokens);

struct Runs {
  int32_t first;
  int32_t last;
};
Runs RunsOf(const QueryTile& tile, const WorkShape& shape) {
  return {static_cast<int32_t>(shape.visibility.First(tile.first) / kSplitTokens),
          (tile.first + tile.tokens - 1) / kSplitTokens + 1};
}

void AddTiles(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
              GpuSchedule& work) {
  const int heads = std::min(shape.Group(), kQueryRows);  // of a tile
  const int tile_tokens = shape.Group() > kQueryRows ? 1 : kQueryRows / shape.Group();
  for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      const SequenceRows& sequence = batch.sequences[s];
      for (int64_t first = sequence.span.start; first < sequence.End();) {
        const int64_t page_end = (first / page_size + 1) * page_size;
        const int64_t last = std::min({sequence.End(), page_end, first + tile_tokens});
        for (int head = 0; head < shape.Group(); head += heads) {
          work.tiles.push_back({.pages = first_pages[s],
                                .first = static_cast<int32_t>(first),
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

}  // namespace

int64_t TilesOfToken(const WorkShape& shape) {
  return int64_t{shape.kv_heads} * ((shape.Group() + kQueryRows - 1) / kQueryRows);
}

void MakeGpuSchedule(const WorkShape& shape, const Batch& batch, const std::vector<int32_t>& first_pages, int page_size,
                     int64_t max_parallel_splits, GpuSchedule& work) {
  work.tiles.clear();
  work.tasks.clear();
  work.slots = 0;
  AddTiles(shape, batch, first_pages, page_size, work);
  int64_t runs = 0;
  for (const kernels::cuda::QueryTile& tile : work.tiles) runs += RunsOf(tile, shape).last - RunsOf(tile, shape).first;
  const bool spread = runs <= max_parallel_splits;
  // Later tiles of a chunk see more: handed out first, they leave no straggler.
  for (size_t i = work.tiles.size(); i-- > 0;) {
    kernels::cuda::QueryTile& tile = work.tiles[i];
    const Runs all = RunsOf(tile, shape);
    tile.slot = static_cast<int32_t>(work.slots);
    tile.parts = spread ? all.last - all.first : 1;
    const int32_t step = spread ? 1 : all.last - all.first;
    for (int32_t run = all.first; run < all.last; run += step) {
      work.tasks.push_back({.tile = static_cast<int32_t>(i),
                            .slot = static_cast<int32_t>(work.slots),
                            .first_split = run,
                            .last_split = run + step});
      work.slots += kQueryRows;
    }
  }
}

}  // namespace kvanta::attention
