// The memory of records that are offloaded: blocks never overlap, and what was freed is one range again.
#include "store/host_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kvanta/error.h"

namespace kvanta::store {
namespace {

constexpr int64_t kUnit = 256;  // alignment of blocks

TEST(HostArenaTest, BlocksAreFreedWithTheirLastCopy) {
  const auto arena = HostArena::Make(Cpu(), 4 * kUnit);
  Buffer first = arena->Allocate(kUnit + 1);
  EXPECT_EQ(first.bytes(), static_cast<size_t>(kUnit + 1));
  EXPECT_EQ(arena->UsedBytes(), 2 * kUnit);
  EXPECT_TRUE(arena->Owns(first));
  EXPECT_FALSE(arena->Owns(Cpu().Allocate(1)));
  EXPECT_FALSE(arena->Allocate(3 * kUnit)) << "two units are left";
  Buffer copy = first;
  first = {};
  EXPECT_EQ(arena->UsedBytes(), 2 * kUnit);
  copy = {};
  EXPECT_EQ(arena->UsedBytes(), 0);
  EXPECT_TRUE(arena->Allocate(4 * kUnit));
}

TEST(HostArenaTest, ABlockSharesTheArena) {
  auto arena = HostArena::Make(Cpu(), 4 * kUnit);
  const std::weak_ptr<HostArena> alive = arena;
  Buffer block = arena->Allocate(kUnit);
  arena.reset();
  block.data()[0] = 1;
  EXPECT_FALSE(alive.expired());
  block = {};
  EXPECT_TRUE(alive.expired());
}

// Records of two sizes: freed ranges take records of their size again, and none is lost.
TEST(HostArenaTest, RandomBlocksNeitherOverlapNorGetLost) {
  constexpr int64_t kUnits = 64;
  std::mt19937_64 random(3);
  const auto arena = HostArena::Make(Cpu(), kUnits * kUnit);
  struct Block {
    Buffer memory;
    uint8_t mark;
  };
  std::vector<Block> blocks;
  int64_t used = 0;
  int refused = 0;
  for (int i = 0; i < 5000; ++i) {
    if (!blocks.empty() && random() % 2 == 0) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block& last = blocks.back();
      ASSERT_TRUE(std::all_of(last.memory.data(), last.memory.data() + last.memory.bytes(), [&](uint8_t byte) {
        return byte == last.mark;
      })) << "another block wrote there";
      used -= static_cast<int64_t>(last.memory.bytes());
      blocks.pop_back();
    } else if (Buffer memory = arena->Allocate(static_cast<int64_t>(random() % 5 + 1) * kUnit)) {
      const auto mark = static_cast<uint8_t>(i);
      std::fill_n(memory.data(), memory.bytes(), mark);
      used += static_cast<int64_t>(memory.bytes());
      blocks.push_back({std::move(memory), mark});
    } else {
      ++refused;
    }
    ASSERT_EQ(arena->UsedBytes(), used);
    ASSERT_LE(used, arena->Bytes());
  }
  EXPECT_GT(refused, 0);
  blocks.clear();
  EXPECT_TRUE(arena->Allocate(kUnits * kUnit)) << "one range";
}

TEST(HostArenaTest, MoreThanTheMachineHasIsRefused) {
  try {
    HostArena::Make(Cpu(), int64_t{1} << 60);
    FAIL() << "an exbibyte";
  } catch (const ResourceError& error) {
    EXPECT_NE(std::string(error.what()).find("bytes of memory are available"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace kvanta::store
