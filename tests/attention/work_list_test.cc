// Work partitioning: a step's tiles, KV splits, tasks and task batches.
#include "attention/work_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "attention/batch.h"

namespace kvanta::attention {
namespace {

TEST(WorkListTest, SpreadsTheRunsOfFewRowsAndKeepsManyWhole) {
  const WorkShape shape{.heads = 4, .kv_heads = 1, .head_dim = 64, .visibility = {}};
  Batch batch;
  batch.sequences.push_back({.span = {.start = 10000, .tokens = 1, .pages = nullptr}, .first_row = 0});
  WorkList list;
  MakeWorkList(shape, batch, 64, 2, list);
  EXPECT_EQ(list.tiles.size(), 1u);
  EXPECT_EQ(list.tasks.size(), 10u);
  EXPECT_EQ(list.combines.size(), 1u);
  EXPECT_EQ(list.split_rows, 40);
  MakeWorkList(shape, batch, 64, 1, list);
  EXPECT_EQ(list.tasks.size(), 1u);
  EXPECT_EQ(list.split_rows, 0);
  batch.sequences[0].span.tokens = 512;
  MakeWorkList(shape, batch, 64, 2, list);
  EXPECT_EQ(list.split_rows, 0);  // workspace stays O(tile), independent of the chunk's prefix
  for (const QueryTile& tile : list.tiles) {
    EXPECT_LE(tile.tokens * shape.Group(), kTileRows);
    EXPECT_EQ(tile.first / 64, (tile.first + tile.tokens - 1) / 64);
  }
}

TEST(WorkListTest, KeepsTilesWholeThatComeOutEvenAndSpreadsOthers) {
  const WorkShape shape{.heads = 8, .kv_heads = 2, .head_dim = 64, .visibility = {}};
  Batch batch;
  WorkList list;
  for (int sequences = 1; sequences <= 9; ++sequences) {
    batch.sequences.push_back({.span = {.start = 4200, .tokens = 1, .pages = nullptr}, .first_row = sequences - 1});
    MakeWorkList(shape, batch, 64, 2, list);
    if (list.tiles.size() % 2 == 0) {
      EXPECT_EQ(list.tasks.size(), list.tiles.size()) << sequences;
      EXPECT_EQ(list.split_rows, 0) << sequences;
    } else {
      EXPECT_EQ(list.tasks.size(), 5 * list.tiles.size()) << sequences;
    }
  }
  EXPECT_EQ(list.tiles.size(), 9U);
}

TEST(WorkListTest, TakesHeadsOfFewTokensTogetherAndEachOnce) {
  const WorkShape shape{.heads = 12, .kv_heads = 6, .head_dim = 64, .visibility = {}};
  Batch batch;
  batch.sequences.push_back({.span = {.start = 20000, .tokens = 1, .pages = nullptr}, .first_row = 0});
  WorkList list;
  MakeWorkList(shape, batch, 64, 2, list);
  ASSERT_EQ(list.tiles.size(), 1u);
  EXPECT_EQ(list.tiles[0].kv_heads, 6);
  EXPECT_EQ(list.combines.size(), 6u);
  batch.sequences[0].span.start = 500;  // one KV split: two threads need several tiles
  MakeWorkList(shape, batch, 64, 2, list);
  EXPECT_EQ(list.tiles.size(), 6u);
  MakeWorkList(shape, batch, 64, 1, list);
  EXPECT_EQ(list.tiles.size(), 1u);
  batch.sequences.push_back({.span = {.start = 70, .tokens = 200, .pages = nullptr}, .first_row = 1});
  batch.sequences.push_back({.span = {.start = 7000, .tokens = 7, .pages = nullptr}, .first_row = 201});
  for (const int threads : {1, 2, 4}) {
    MakeWorkList(shape, batch, 64, threads, list);
    std::map<std::pair<int, int64_t>, std::vector<int>> times;  // (sequence, token) -> per KV head
    for (const QueryTile& tile : list.tiles) {
      EXPECT_LE(tile.kv_heads * tile.tokens * shape.Group(), kTileRows);
      for (int64_t token = tile.first; token < tile.first + tile.tokens; ++token) {
        std::vector<int>& of_token = times[{tile.sequence, token}];
        of_token.resize(6);
        for (int head = 0; head < tile.kv_heads; ++head) ++of_token.at(static_cast<size_t>(tile.kv_head + head));
      }
    }
    EXPECT_EQ(times.size(), 1u + 200u + 7u);
    for (const auto& [token, heads] : times) EXPECT_EQ(heads, std::vector<int>(6, 1)) << token.second;
  }
}

TEST(WorkListTest, BundlesSmallTasksAndLeavesNoneOut) {
  const WorkShape shape{.heads = 8, .kv_heads = 2, .head_dim = 64, .visibility = {}};
  Batch batch;
  WorkList list;
  for (int i = 0; i < 1000; ++i) {
    batch.sequences.push_back({.span = {.start = 64, .tokens = 1, .pages = nullptr}, .first_row = i});
    if (i != 0 && i != 299 && i != 999) continue;
    for (const int threads : {1, 2, 4}) {
      MakeWorkList(shape, batch, 64, threads, list);
      size_t next = 0;
      for (int64_t index = 0; index < list.Batches(); ++index) {
        const std::pair<size_t, size_t> tasks = list.BatchOf(index);
        EXPECT_EQ(tasks.first, next);
        EXPECT_GT(tasks.second, tasks.first);
        next = tasks.second;
      }
      EXPECT_EQ(next, list.tasks.size());
      EXPECT_GE(list.Batches(), std::min<int64_t>(std::ssize(list.tasks), 16 * threads));  // enough for all threads
      EXPECT_EQ(list.task_batch > 1, i == 999 || (i == 299 && threads <= 2));
    }
  }
}

}  // namespace
}  // namespace kvanta::attention
