#include "parallel/nccl.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvanta/error.h"
#include "kvanta/rank_lost_error.h"
#include "parallel/fake_nccl.h"
#include "parallel/gloo_communicator.h"

namespace kvanta::parallel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

class NcclTest : public testing::Test {
 protected:
  NcclTest() {
    std::string name = testing::TempDir() + "nccl-XXXXXX";
    folder_ = mkdtemp(name.data());
    void* const handle = dlopen(KVANTA_FAKE_NCCL, RTLD_NOW);
    take_ = reinterpret_cast<FakeNcclTakeCallsFunction>(dlsym(handle, "FakeNcclTakeCalls"));
    fail_ = reinterpret_cast<FakeNcclFailFunction>(dlsym(handle, "FakeNcclFail"));
    TakeCalls();
  }
  ~NcclTest() override {
    fail_("", 0);
    std::filesystem::remove_all(folder_);
  }

  // Ranks as threads of this process.
  void Run(int size, const std::function<void(Communicator&)>& body) const {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([this, rank, size, &body] {
        body(*JoinGloo({.rank = rank, .size = size, .folder = folder_, .identity = "model = a\n"}));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  FakeNcclCalls TakeCalls() const {
    FakeNcclCalls taken;
    take_(&taken);
    return taken;
  }

  std::string folder_;
  FakeNcclTakeCallsFunction take_ = nullptr;
  FakeNcclFailFunction fail_ = nullptr;
};

TEST_F(NcclTest, GathersBytesOfAllRanksInTheirOrder) {
  constexpr int kRanks = 3;
  constexpr size_t kBytes = 1000;
  int stream = 0;
  Run(kRanks, [&](Communicator& ranks) {
    NcclGroup group(LoadNccl(KVANTA_FAKE_NCCL), ranks, [] {});
    const auto value = [](int rank, size_t i) { return static_cast<uint8_t>(static_cast<size_t>(rank) * 50 + i % 47); };
    std::vector<uint8_t> own, all(kRanks * kBytes), in_place(kRanks * kBytes);
    for (size_t i = 0; i < kBytes; ++i) own.push_back(value(ranks.Rank(), i));
    uint8_t* const place = in_place.data() + static_cast<size_t>(ranks.Rank()) * kBytes;
    std::copy(own.begin(), own.end(), place);
    EXPECT_EQ(group.AllGather(own.data(), all.data(), kBytes, &stream), "");
    EXPECT_EQ(group.AllGather(place, in_place.data(), kBytes, &stream), "");
    EXPECT_EQ(group.AsyncError(), "");
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], value(static_cast<int>(i / kBytes), i % kBytes)) << i;
    EXPECT_EQ(in_place, all);
  });
  const FakeNcclCalls calls = TakeCalls();
  EXPECT_EQ(calls.ids, 1) << "rank 0 alone has one";
  EXPECT_EQ(calls.inits, kRanks);
  EXPECT_EQ(calls.gathers, 2 * kRanks);
  EXPECT_EQ(calls.bytes, int64_t{2} * kRanks * static_cast<int64_t>(kBytes));
  EXPECT_EQ(calls.in_place, kRanks);
  EXPECT_EQ(calls.data_type, 1) << "ncclUint8";
  EXPECT_EQ(calls.stream, &stream);
  EXPECT_EQ(calls.aborts, kRanks) << "groups end without waiting for each other";
}

TEST_F(NcclTest, ErrorsHaveNcclsWords) {
  Communicator alone;
  NcclGroup group(LoadNccl(KVANTA_FAKE_NCCL), alone, [] {});
  int value = 0;
  fail_("ncclAllGather", 2);
  EXPECT_THAT(group.AllGather(&value, &value, sizeof(value), nullptr),
              AllOf(HasSubstr(KVANTA_FAKE_NCCL), HasSubstr("ncclAllGather failed: unhandled system error")));
  fail_("a gather", 6);
  EXPECT_THAT(group.AsyncError(), HasSubstr("a gather failed: remote process exited"));
  fail_("a gather", 7);
  EXPECT_EQ(group.AsyncError(), "") << "in progress";
  fail_("ncclGetUniqueId", 2);
  EXPECT_THAT([&] { NcclGroup(LoadNccl(KVANTA_FAKE_NCCL), alone, [] {}); },
              ThrowsMessage<ResourceError>(HasSubstr("ncclGetUniqueId failed: unhandled system error")));
  fail_("ncclCommInitRank", 6);
  EXPECT_THAT([&] { NcclGroup(LoadNccl(KVANTA_FAKE_NCCL), alone, [] {}); },
              ThrowsMessage<ResourceError>(HasSubstr("ncclCommInitRank failed: remote process exited")));
}

// Rank 0 of two, the other of which has been reported as lost.
class WithoutTheOther final : public Communicator {
 public:
  int Size() const noexcept override { return 2; }
  void CheckReports() override { throw RankLostError(1, 2, "it was killed"); }
};

TEST_F(NcclTest, JoiningEndsWhenARankIsLost) {
  WithoutTheOther ranks;
  EXPECT_THAT([&] { NcclGroup(LoadNccl(KVANTA_FAKE_NCCL), ranks, [] {}); },
              ThrowsMessage<RankLostError>(HasSubstr("it was killed")));
  Communicator alone;
  EXPECT_THAT([&] { NcclGroup(LoadNccl(KVANTA_FAKE_NCCL), alone, [] { throw ResourceError("no such GPU"); }); },
              ThrowsMessage<ResourceError>(HasSubstr("no such GPU")));
}

TEST_F(NcclTest, AnEndedGroupGathersNoMore) {
  Communicator alone;
  int value = 0;
  {
    NcclGroup group(LoadNccl(KVANTA_FAKE_NCCL), alone, [] {});
    group.Abort();
    group.Abort();
    EXPECT_THAT(group.AllGather(&value, &value, sizeof(value), nullptr), HasSubstr("has been ended"));
    EXPECT_EQ(group.AsyncError(), "");
  }
  EXPECT_EQ(TakeCalls().aborts, 1);
}

TEST_F(NcclTest, ALibraryThatCannotServeIsNamedWithWhatToInstall) {
  const auto install = HasSubstr("install Debian's libnccl2, or nvidia-nccl-cu12 or nvidia-nccl-cu13");
  EXPECT_THAT([] { LoadNccl("libnccl-missing.so.2"); },
              ThrowsMessage<ResourceError>(AllOf(HasSubstr("libnccl-missing.so.2"), install)));
  EXPECT_THAT([] { LoadNccl(KVANTA_FAKE_NCCL_WITHOUT_ABORT); },
              ThrowsMessage<ResourceError>(
                  AllOf(HasSubstr(KVANTA_FAKE_NCCL_WITHOUT_ABORT), HasSubstr("lacks ncclCommAbort"), install)));
  EXPECT_THAT([] { LoadNccl(KVANTA_FAKE_NCCL_OLD); },
              ThrowsMessage<ResourceError>(AllOf(HasSubstr(KVANTA_FAKE_NCCL_OLD), HasSubstr("version code is 2708"),
                                                 HasSubstr("2.11 (21100) or later is required"), install)));
}

}  // namespace
}  // namespace kvanta::parallel
