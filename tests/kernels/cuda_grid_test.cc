// The emulated grid: results, and detection of errors and undefined behavior.
#include "emulated/cuda_grid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "emulated/cuda_primitives.h"
#include "emulated/cuda_warpgroup.h"
// Primitives first.
#include "kernels/attention/cuda/product_check.h"

namespace kvanta::emulated {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(const GridShape& shape, const std::function<void()>& kernel) {
  try {
    RunGrid(shape, kernel);
  } catch (const EmulationError& error) {
    return error.what();
  }
  return "none";
}

TEST(CudaGridTest, BlocksThreadsShufflesAndBarriers) {
  std::vector<int> sums(3 * 4);
  RunGrid({.blocks = 3, .threads = 128, .shared_bytes = 128 * 4}, [&] {
    const int thread = ThreadIndex();
    int sum = thread;
    for (int mask = 1; mask < kWarp; mask *= 2) sum += ShuffleXor(sum, mask);
    StoreShared(thread * 4, sum + 1000 * BlockIndex());
    SyncBlock();
    const int other = (thread + 32) % 128;  // another warp's
    if (thread % kWarp == 0) sums.data()[BlockIndex() * 4 + thread / kWarp] = LoadShared<int>(other * 4);
  });
  for (int block = 0; block < 3; ++block) {
    for (int warp = 0; warp < 4; ++warp) {
      const int next = (warp + 1) % 4;
      EXPECT_EQ(sums.data()[block * 4 + warp], next * 1024 + 496 + 1000 * block);
    }
  }
}

// Blocks run in another order in each of three grids; the last to arrive sees what all have written.
TEST(CudaGridTest, TheLastBlockToArriveIsTheLastOfTheOrder) {
  std::vector<int> last;
  uint32_t counter = 0;
  for (int grid = 0; grid < 3; ++grid) {
    std::vector<int> written(5);
    RunGrid({.blocks = 5, .threads = 64}, [&] {
      if (AnyThread(false) || !AnyThread(ThreadIndex() == 40)) Stop("votes of another barrier");
      if (ThreadIndex() == 63) written.data()[BlockIndex()] = 1;
      if (!IsLastToArrive(&counter, 5)) return;
      int sum = 0;
      for (int block = 0; block < 5; ++block) sum += written.data()[block];
      if (sum != 5) Stop("{} of 5 blocks", sum);
      if (ThreadIndex() == 0) last.push_back(BlockIndex());
    });
    EXPECT_EQ(counter, 0U);
  }
  EXPECT_THAT(last, ::testing::UnorderedElementsAre(4, 0, 1));
  counter = 7;
  EXPECT_THAT(ErrorOf({}, [&] { IsLastToArrive(&counter, 5); }), HasSubstr("7 blocks before this one of 5"));
}

TEST(CudaGridTest, StopsWhereLanesPart) {
  EXPECT_THAT(ErrorOf({},
                      [] {
                        if (ThreadIndex() < 5) SyncWarp();
                      }),
              HasSubstr("5 in a warp operation, 0 at a block barrier, 27 done"));
  EXPECT_THAT(ErrorOf({},
                      [] {
                        if (ThreadIndex() < 5) {
                          SyncWarp();
                        } else {
                          ShuffleXor(1, 1);
                        }
                      }),
              HasSubstr("diverges: lane 0 in"));
  EXPECT_THAT(ErrorOf({.threads = 64},
                      [] {
                        if (ThreadIndex() < 32) SyncBlock();
                      }),
              HasSubstr("32 of 64 threads wait"));
}

TEST(CudaGridTest, StopsAtBadSharedMemory) {
  const GridShape shape{.threads = 64, .shared_bytes = 64};
  EXPECT_EQ(ErrorOf(shape,
                    [] {
                      if (ThreadIndex() == 0) StoreShared(60, 1);
                    }),
            "none");
  EXPECT_THAT(ErrorOf(shape, [] { StoreShared(64, 1); }), HasSubstr("[64, 68) of 64 bytes"));
  EXPECT_THAT(ErrorOf(shape, [] { StoreShared(2, 1); }), HasSubstr("not a multiple of 4"));
  EXPECT_THAT(ErrorOf(shape, [] { LoadShared<int>(0); }), HasSubstr("read before it was written"));
  EXPECT_THAT(ErrorOf(shape, [] { StoreShared(0, 1); }), HasSubstr("no barrier between"));
  // A read by another warp needs a block barrier; a warp barrier is not enough.
  EXPECT_THAT(ErrorOf(shape,
                      [] {
                        if (ThreadIndex() == 0) StoreShared(0, 1);
                        SyncWarp();
                        LoadShared<int>(0);
                      }),
              HasSubstr("race with thread 0, which wrote it"));
  // A write after reads.
  EXPECT_THAT(ErrorOf(shape,
                      [] {
                        if (ThreadIndex() == 0) StoreShared(0, 1);
                        SyncBlock();
                        LoadShared<int>(0);
                        if (ThreadIndex() == 40) StoreShared(0, 2);
                      }),
              HasSubstr("which read it (no barrier between)"));
}

TEST(CudaGridTest, PartsOfWordsHaveTheirOwnHistory) {
  const GridShape shape{.threads = 64, .shared_bytes = 8};
  const auto store_half = [](int thread, int offset) {
    if (ThreadIndex() == thread) StoreShared(offset, static_cast<uint16_t>(thread));
  };
  EXPECT_EQ(ErrorOf(shape,
                    [&] {
                      store_half(1, 0);
                      store_half(40, 2);
                      SyncBlock();
                      if (LoadShared<uint32_t>(0) != ((40U << 16U) | 1U)) Stop("not what was stored");
                    }),
            "none");
  EXPECT_THAT(ErrorOf(shape,
                      [&] {
                        store_half(1, 0);
                        store_half(2, 2);
                        if (ThreadIndex() == 3) LoadShared<uint32_t>(0);
                      }),
              HasSubstr("race with thread 1, which wrote it"));
  EXPECT_THAT(ErrorOf(shape,
                      [&] {
                        if (ThreadIndex() == 1) StoreShared(0, 1);
                        store_half(2, 2);
                      }),
              HasSubstr("shared byte 2: race with thread 1, which wrote it"));
  EXPECT_THAT(ErrorOf(shape,
                      [&] {
                        store_half(1, 0);
                        SyncBlock();
                        LoadShared<uint32_t>(0);
                      }),
              HasSubstr("shared byte 2: read before it was written"));
}

TEST(CudaGridTest, ABlockDoesNotReadWhatAnotherWrote) {
  int calls = 0;
  EXPECT_THAT(ErrorOf({.blocks = 2, .threads = kWarp, .shared_bytes = 4},
                      [&] {
                        if (calls++ == 0) StoreShared(0, 1);
                        SyncBlock();
                        if (calls > kWarp) LoadShared<int>(0);
                      }),
              HasSubstr("read before it was written"));
}

TEST(CudaGridTest, StopsAtMisalignedGlobalMemory) {
  alignas(16) static const uint8_t bytes[32] = {};
  EXPECT_EQ(ErrorOf({}, [] { LoadVec4(bytes + 16); }), "none");
  EXPECT_THAT(ErrorOf({}, [] { LoadVec4(bytes + 8); }), HasSubstr("not a multiple of 16"));
}

// Three groups of copies in flight; the thread waits for the older ones.
TEST(CudaGridTest, CopiesArriveWhenTheyAreWaitedFor) {
  alignas(16) static const uint8_t from[4 * 16 * kWarp] = {1, 2, 3};
  const auto kernel = [](bool wait, bool sync, int then) {
    return [=] {
      for (int group = 0; group < 3; ++group) {
        CopyToShared16((group * kWarp + ThreadIndex()) * 16, from + (group * kWarp + ThreadIndex()) * 16);
        CommitCopies();
      }
      if (wait) WaitForCopies<1>();
      if (sync) SyncWarp();
      const int other = ThreadIndex() == 0 ? 0 : ThreadIndex() - 1;
      const auto first = LoadShared<uint8_t>((then * kWarp + other) * 16);
      if (first != from[(then * kWarp + other) * 16]) Stop("another byte");
    };
  };
  const GridShape shape{.shared_bytes = 3 * 16 * kWarp};
  EXPECT_EQ(ErrorOf(shape, kernel(true, true, 0)), "none");
  EXPECT_EQ(ErrorOf(shape, kernel(true, true, 1)), "none");
  EXPECT_THAT(ErrorOf(shape, kernel(true, true, 2)), HasSubstr("an asynchronous copy to it was not waited for"));
  EXPECT_THAT(ErrorOf(shape, kernel(false, true, 0)), HasSubstr("an asynchronous copy to it was not waited for"));
  EXPECT_THAT(ErrorOf(shape, kernel(true, false, 0)), HasSubstr("no barrier between"));
}

TEST(CudaGridTest, ProductsOfWarpgroupsAreThoseOfWarps) {
  using kernels::cuda::ProductCheck;
  int64_t differences = 0;
  RunGrid({.threads = ProductCheck::kThreads, .shared_bytes = ProductCheck::kSharedBytes},
          [&] { ProductCheck::Run(&differences); });
  EXPECT_EQ(differences, 0);
}

TEST(CudaGridTest, StopsAtProductsOutOfOrder) {
  const auto kernel = [](bool fences_stores, bool fences, bool commits, bool waits) {
    return [=] {
      if (ThreadIndex() < kWarp) StoreMatrices((ThreadIndex() / 8 * 8 + ThreadIndex() % 8) * 16, {{0x3c003c00U}});
      if (ThreadIndex() < kWarp) StoreMatrices((kWarp + ThreadIndex()) * 16, {{0x3c003c00U}});
      if (fences_stores) FenceStoresForProducts();
      SyncBlock();
      float d[4][4] = {};
      if (fences) FenceProducts();
      WarpgroupMma<false, 4>(d, {{0x3c003c00U, 0x3c003c00U}}, {.offset = 0, .k_stride = 128, .n_stride = 256});
      if (commits) CommitProducts();
      if (waits) WaitForProducts();
      if (waits ? d[0][0] != 8 || d[1][0] != 0 || d[2][0] != 8 : !std::isnan(d[0][0])) Stop("d is {}", d[0][0]);
    };
  };
  const GridShape shape{.threads = 4 * kWarp, .shared_bytes = 4 * 2 * 128};
  EXPECT_EQ(ErrorOf(shape, kernel(true, true, true, true)), "none");
  EXPECT_EQ(ErrorOf(shape, kernel(true, true, true, false)), "none") << "results are NaN until the wait";
  EXPECT_THAT(ErrorOf(shape, kernel(false, true, true, true)), HasSubstr("has not fenced its store"));
  EXPECT_THAT(ErrorOf(shape, kernel(true, false, true, true)), HasSubstr("without FenceProducts"));
  EXPECT_THAT(ErrorOf(shape, kernel(true, true, false, true)), HasSubstr("0 of 1 products were committed"));
}

}  // namespace
}  // namespace kvanta::emulated
