// Division of a step's attention among the blocks of a GPU.
#include "attention/gpu_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace kvanta::attention {
namespace {

// Work items hold all KV splits of all tiles, in order.
void CheckSchedule(const GpuSchedule& schedule, const std::vector<int>& splits, int64_t blocks) {
  ASSERT_EQ(schedule.tiles.size(), splits.size());
  ASSERT_EQ(std::ssize(schedule.single.work_indptr), blocks + 1);
  EXPECT_EQ(schedule.single.work_indptr.front(), 0);
  EXPECT_EQ(schedule.single.work_indptr.back(), std::ssize(schedule.single.tasks));
  EXPECT_TRUE(std::is_sorted(schedule.single.work_indptr.begin(), schedule.single.work_indptr.end()));
  auto task = schedule.single.tasks.begin();
  int64_t rows = 0;
  for (size_t i = 0; i < splits.size(); ++i) {
    const kernels::cuda::QueryTile& tile = schedule.tiles[i];
    EXPECT_EQ(tile.result_row, rows);
    for (int split = 0; split < splits[i]; split = (task++)->last_split) {
      ASSERT_NE(task, schedule.single.tasks.end());
      EXPECT_EQ(task->tile, static_cast<int>(i));
      EXPECT_EQ(task->first_split, split);
      EXPECT_GT(task->last_split, split);
      const bool whole = split == 0 && task->last_split == splits[i];
      EXPECT_EQ(task->result_rows, whole ? 0 : schedule.tile_rows);
      EXPECT_EQ(tile.num_results, whole ? 1 : splits[i]);
      EXPECT_EQ(task->result_row, tile.result_row + split * schedule.tile_rows);
    }
    rows += int64_t{tile.num_results} * schedule.tile_rows;
  }
  EXPECT_EQ(task, schedule.single.tasks.end());
  EXPECT_EQ(schedule.result_rows, rows);
}

TEST(GpuScheduleTest, DividesTilesAmongBlocksUpToALimit) {
  const WorkShape shape{.heads = 40, .kv_heads = 2, .head_dim = 64, .visibility = {}};  // groups of 20
  Batch batch;
  batch.sequences.push_back({.span = {.start = 3000, .tokens = 2, .pages = nullptr}, .first_row = 0});
  GpuSchedule schedule;
  const std::vector<int> splits(2 * 2 * 2, 3);  // for each of 2 KV heads, 2 tokens, 16 and 4 heads
  for (const auto& [blocks, tasks] : {std::pair{8, 8}, {1, 8}, {24, 24}, {30, 24}, {13, 16}}) {
    SCOPED_TRACE(blocks);
    MakeGpuSchedule(shape, batch, {0}, 64, {.large_blocks = blocks}, schedule);
    CheckSchedule(schedule, splits, blocks);
    EXPECT_EQ(std::ssize(schedule.single.tasks), tasks);
  }
  MakeGpuSchedule(shape, batch, {0}, 64, {.large_blocks = 24, .max_result_rows = 0}, schedule);  // nothing is divided
  CheckSchedule(schedule, splits, 24);
  EXPECT_EQ(schedule.result_rows, 8 * 16);
  // One token more than eight splits: blocks get whole ones and, in addition, splits of one token.
  const WorkShape small{.heads = 4, .kv_heads = 1, .head_dim = 64, .visibility = {}};
  batch.sequences.assign(66, {.span = {.start = 8192, .tokens = 1, .pages = nullptr}, .first_row = 0});
  MakeGpuSchedule(small, batch, std::vector<int32_t>(66), 64, {.small_blocks = 66}, schedule);
  CheckSchedule(schedule, std::vector<int>(66, 9), 66);
  EXPECT_EQ(schedule.single.tasks.size(), 66U);
}

// A prompt's tiles: at any time, blocks are at adjacent ones.
TEST(GpuScheduleTest, BlocksTakeAdjacentTilesAtATime) {
  const WorkShape shape{.heads = 4, .kv_heads = 1, .head_dim = 64, .visibility = {}};
  Batch batch;
  batch.sequences.push_back({.span = {.start = 256, .tokens = 160, .pages = nullptr}, .first_row = 0});
  GpuSchedule schedule;
  MakeGpuSchedule(shape, batch, {0}, 64, {.large_blocks = 10}, schedule);
  ASSERT_EQ(schedule.tiles.size(), 40U);
  ASSERT_EQ(schedule.single.tasks.size(), 40U);
  for (size_t block = 0; block < 10; ++block) {
    ASSERT_EQ(schedule.single.work_indptr[block], static_cast<int32_t>(4 * block));
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(schedule.single.tasks[4 * block + i].tile, static_cast<int32_t>(block + 10 * i));
    }
  }
}

// Sequences of very different lengths: no work item costs much more than the mean.
TEST(GpuScheduleTest, WorkItemsAreOfEqualCost) {
  const WorkShape shape{.heads = 8, .kv_heads = 2, .head_dim = 64, .visibility = {}};
  Batch batch;
  std::vector<int32_t> first_pages;
  int splits = 0;
  for (const int length : {20000, 3, 900, 1024, 1, 5000, 300, 257, 12000, 64, 131071}) {
    batch.sequences.push_back({.span = {.start = length, .tokens = 1, .pages = nullptr}, .first_row = 0});
    first_pages.push_back(0);
    splits += 2 * (length / kSplitTokens + 1);
  }
  GpuSchedule schedule;
  constexpr int kBlocks = 50;
  MakeGpuSchedule(shape, batch, first_pages, 64, {.small_blocks = kBlocks}, schedule);
  ASSERT_EQ(std::ssize(schedule.single.work_indptr), kBlocks + 1);
  for (size_t item = 0; item < kBlocks; ++item) {
    int cost = 0;
    for (int i = schedule.single.work_indptr[item]; i < schedule.single.work_indptr[item + 1]; ++i) {
      cost += schedule.single.tasks[static_cast<size_t>(i)].last_split -
              schedule.single.tasks[static_cast<size_t>(i)].first_split;
    }
    EXPECT_LE(cost, splits / kBlocks + 3) << item;
  }
}

// Tiles of a page and KV head are in groups of up to four, those of decode sequences and the last two of a page alone.
TEST(GpuScheduleTest, TilesOfAPageAreInGroups) {
  const WorkShape shape{.heads = 6, .kv_heads = 2, .head_dim = 64, .visibility = {}};  // 5 tokens in a tile
  Batch batch;
  batch.sequences.push_back({.span = {.start = 2048, .tokens = 64 + 30, .pages = nullptr}, .first_row = 0});
  batch.sequences.push_back({.span = {.start = 3000, .tokens = 1, .pages = nullptr}, .first_row = 94});
  GpuSchedule schedule;
  for (const int64_t max_result_rows : {int64_t{0}, kMaxResultRows}) {
    MakeGpuSchedule(shape, batch, {0, 64}, 64,
                    {.large_blocks = 6, .group_blocks = 11, .max_result_rows = max_result_rows}, schedule);
    ASSERT_EQ(schedule.tiles.size(), 2U * (13 + 6 + 1));
    ASSERT_EQ(schedule.groups.WorkItems(), 11);
    ASSERT_EQ(schedule.single.WorkItems(), 6);
    std::vector<std::pair<int, int>> groups;
    std::vector<int> single;
    std::vector<std::vector<int>> splits(schedule.tiles.size());  // by tile
    for (const GpuTasks* list : {&schedule.groups, &schedule.single}) {
      EXPECT_EQ(list->work_indptr.back(), std::ssize(list->tasks));
      for (const kernels::cuda::SplitTask& task : list->tasks) {
        const auto tile = static_cast<size_t>(task.tile);
        if (task.first_split == 0 && list == &schedule.groups) groups.emplace_back(task.tile, task.tiles);
        if (task.first_split == 0 && list == &schedule.single) single.push_back(task.tile);
        EXPECT_EQ(task.result_row, schedule.tiles[tile].result_row + task.first_split * task.result_rows);
        for (int i = 0; i < task.tiles; ++i) {
          EXPECT_EQ(schedule.tiles[tile + static_cast<size_t>(i)].num_results, task.result_rows != 0 ? 3 : 1);
          for (int split = task.first_split; split < task.last_split; ++split) {
            splits[tile + static_cast<size_t>(i)].push_back(split);
          }
        }
      }
    }
    std::sort(groups.begin(), groups.end());
    std::sort(single.begin(), single.end());
    using Groups = std::vector<std::pair<int, int>>;
    EXPECT_EQ(groups, (Groups{{0, 4}, {4, 4}, {8, 4}, {13, 4}, {20, 4}, {24, 4}, {28, 4}, {33, 4}}));
    EXPECT_EQ(single, (std::vector<int>{12, 17, 18, 19, 32, 37, 38, 39}));
    for (const std::vector<int>& of_tile : splits) EXPECT_EQ(of_tile, (std::vector<int>{0, 1, 2}));
    // No two results share rows.
    std::vector<std::pair<int, int>> rows;
    for (const kernels::cuda::QueryTile& tile : schedule.tiles) rows.emplace_back(tile.result_row, tile.num_results);
    std::sort(rows.begin(), rows.end());
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t end = rows[i].first + int64_t{rows[i].second} * schedule.tile_rows;
      EXPECT_EQ(end, i + 1 < rows.size() ? rows[i + 1].first : schedule.result_rows);
    }
  }
  MakeGpuSchedule(shape, batch, {0, 64}, 64, {.large_blocks = 6}, schedule);
  EXPECT_TRUE(schedule.groups.tasks.empty());
}

// A chunk of 300 positions: the query at 1100 sees [900, 1100], in the first two splits; the one at 1200 only the
// second.
TEST(GpuScheduleTest, SplitsBeginAtTheFirstVisibleToken) {
  const WorkShape shape{
      .heads = 1, .kv_heads = 1, .head_dim = 64, .visibility = {.kind = cache::VisibilityKind::kChunked, .span = 300}};
  for (const auto& [position, first_split] : {std::pair{1100, 0}, {1200, 1}}) {
    Batch batch;
    batch.sequences.push_back({.span = {.start = position, .tokens = 1, .pages = nullptr}, .first_row = 0});
    GpuSchedule schedule;
    MakeGpuSchedule(shape, batch, {0}, 64, {.max_result_rows = 0}, schedule);
    ASSERT_EQ(schedule.single.tasks.size(), 1U);
    EXPECT_EQ(schedule.single.tasks[0].first_split, first_split);
    EXPECT_EQ(schedule.single.tasks[0].last_split, 2);
  }
}

}  // namespace
}  // namespace kvanta::attention
