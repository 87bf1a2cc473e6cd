#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "kvanta/error.h"
#include "kvanta/rank_lost_error.h"
#include "parallel/gloo_communicator.h"
#include "parallel/rank_files.h"

namespace kvanta::parallel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Property;
using testing::Throws;
using testing::ThrowsMessage;

TEST(Partition, PartsAreConsecutiveAndRankOfInvertsThem) {
  for (const int64_t count : {1, 2, 7, 16, 1000}) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      const Partition partition{count, ranks};
      EXPECT_EQ(partition.Begin(0), 0);
      EXPECT_EQ(partition.Begin(ranks), count);
      for (int64_t index = 0; index < count; ++index) {
        const int rank = partition.RankOf(index);
        EXPECT_LE(partition.Begin(rank), index);
        EXPECT_LT(index, partition.Begin(rank + 1)) << count << " " << ranks;
      }
    }
  }
}

// Ranks as threads of this process.
class Ranks : public testing::TestWithParam<bool> {
 protected:
  Ranks() {
    std::string name = testing::TempDir() + "ranks-XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~Ranks() override { std::filesystem::remove_all(folder_); }

  GlooConfig ConfigOf(int rank, int size) const {
    return {.rank = rank, .size = size, .folder = folder_, .identity = "model = a\n", .busy_poll = GetParam()};
  }

  void Run(int size, const std::function<void(Communicator&)>& body) const {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([this, rank, size, &body] { body(*JoinGloo(ConfigOf(rank, size))); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::string folder_;
};

// Values that tell rank, row and column apart.
float Value(int64_t row, int64_t column) {
  return static_cast<float>(row * 100000 + column);
}

std::vector<float> OwnColumns(const Communicator& ranks, int64_t rows, const Partition& columns) {
  std::vector<float> own;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = columns.Begin(ranks.Rank()); column < columns.Begin(ranks.Rank() + 1); ++column) {
      own.push_back(Value(row, column));
    }
  }
  return own;
}

std::vector<float> AllColumns(int64_t rows, int64_t count) {
  return OwnColumns(Communicator(), rows, {count, 1});
}

TEST_P(Ranks, GatherColumnsOfAnySize) {
  Run(3, [](Communicator& ranks) {
    // Parts of different sizes, empty ones, and rows that cross messages.
    for (const auto& [rows, count] : std::vector<std::pair<int64_t, int64_t>>{{1, 8}, {1, 2}, {5, 7}, {33, 5003}}) {
      const Partition columns = ranks.PartitionOf(count);
      const std::vector<float> own = OwnColumns(ranks, rows, columns);
      std::vector<float> all(static_cast<size_t>(rows * count));
      ranks.AllGatherColumns(own.data(), rows, columns, all.data());
      EXPECT_EQ(all, AllColumns(rows, count));
      std::vector<float> root(all.size());
      if (ranks.Rank() == 0) {
        for (int64_t row = 0; row < rows; ++row) {
          std::copy_n(all.data() + row * count, columns.Size(0), root.data() + row * count);
        }
      }
      ranks.GatherColumns(own.data(), rows, columns, root.data());
      EXPECT_EQ(root, ranks.Rank() == 0 ? all : std::vector<float>(all.size()));
    }
    ranks.Check();
  });
}

TEST_P(Ranks, AllToAllOfAnySize) {
  Run(3, [](Communicator& ranks) {
    for (const int64_t bytes : {1, 100, 32768, 100001}) {
      std::vector<uint8_t> own, received(static_cast<size_t>(3 * bytes));
      const auto value = [bytes](int from, int to, int64_t i) {
        return static_cast<uint8_t>(i * 7 + i / bytes + from * 31 + to * 101);
      };
      for (int to = 0; to < 3; ++to) {
        for (int64_t i = 0; i < bytes; ++i) own.push_back(value(ranks.Rank(), to, i));
      }
      ranks.AllToAll(own.data(), bytes, received.data());
      for (int from = 0; from < 3; ++from) {
        for (int64_t i = 0; i < bytes; ++i) {
          const uint8_t expected = from == ranks.Rank() ? uint8_t{0} : value(from, ranks.Rank(), i);
          ASSERT_EQ(received[static_cast<size_t>(from * bytes + i)], expected) << from << " " << i;
        }
      }
    }
    ranks.Check();
  });
}

TEST_P(Ranks, BroadcastMessagesOfAnyLength) {
  Run(3, [](Communicator& ranks) {
    for (const size_t bytes : {0, 1, 4088, 4089, 100000}) {
      std::vector<uint8_t> expected(bytes);
      std::iota(expected.begin(), expected.end(), uint8_t{1});
      std::vector<uint8_t> message = ranks.Rank() == 0 ? expected : std::vector<uint8_t>{9};
      ranks.Broadcast(message);
      EXPECT_EQ(message, expected);
    }
  });
}

TEST_P(Ranks, ALostRankIsNamed) {
  Run(2, [this](Communicator& ranks) {
    if (ranks.Rank() == 1) return ReportRankLoss(folder_, 1, {.rank = 1, .reason = "out of memory"});
    const std::vector<float> own(4);
    std::vector<float> all(8);
    ranks.AllGatherColumns(own.data(), 1, ranks.PartitionOf(8), all.data());
    const std::string lost = "rank 1 of 2 is lost, and the engine ends: out of memory";
    EXPECT_THAT([&] { ranks.Check(); }, ThrowsMessage<RankLostError>(lost));
    std::vector<uint8_t> message;
    EXPECT_THAT([&] { ranks.Broadcast(message); }, ThrowsMessage<RankLostError>(lost));
  });
}

// Rank 0 names the rank that was lost first, by whichever other it notices the end.
TEST_P(Ranks, ARankThatLostAnotherNamesIt) {
  Run(2, [this](Communicator& ranks) {
    if (ranks.Rank() == 1) return ReportRankLoss(folder_, 1, {.rank = 5, .reason = "line 1\nline 2"});
    const std::vector<float> own(4);
    std::vector<float> all(8);
    ranks.AllGatherColumns(own.data(), 1, ranks.PartitionOf(8), all.data());
    EXPECT_THAT([&] { ranks.Check(); },
                Throws<RankLostError>(
                    AllOf(Property(&RankLostError::Rank, 5), Property(&RankLostError::Reason, "line 1\nline 2"))));
  });
}

TEST_P(Ranks, OneThatDoesNotAnswerInTimeIsLost) {
  std::vector<std::thread> threads;
  std::atomic<bool> ended = false;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      GlooConfig config = ConfigOf(rank, 2);
      config.timeout = std::chrono::seconds(1);
      const auto ranks = JoinGloo(config);
      if (rank == 1) {
        while (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return;
      }
      const std::vector<float> own(4);
      std::vector<float> all(8);
      ranks->AllGatherColumns(own.data(), 1, ranks->PartitionOf(8), all.data());
      EXPECT_THAT([&] { ranks->Check(); },
                  Throws<RankLostError>(Property(&RankLostError::Reason,
                                                 "it did not answer within 1 seconds (distributed_timeout_seconds)")));
      ended = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(Ranks, ThatDifferDoNotJoin) {
  std::thread other([this] {
    GlooConfig config = ConfigOf(1, 2);
    config.identity = "model = b\n";
    EXPECT_THAT([&] { JoinGloo(config); }, ThrowsMessage<InputError>(HasSubstr("model = ")));
  });
  EXPECT_THAT([&] { JoinGloo(ConfigOf(0, 2)); },
              ThrowsMessage<InputError>(HasSubstr("rank 1 of 2 has model = b, and rank 0 has model = a")));
  other.join();
}

TEST_P(Ranks, OneThatEndsBeforeItJoins) {
  ReportRankLoss(folder_, 1, {.rank = 1, .reason = "no memory"});
  EXPECT_THAT([&] { JoinGloo(ConfigOf(0, 2)); },
              ThrowsMessage<RankLostError>("rank 1 of 2 is lost, and the engine ends: no memory"));
}

TEST_P(Ranks, OneThatEndsWhileTheyConnect) {
  GlooConfig config = ConfigOf(0, 2);
  config.timeout = std::chrono::seconds(5);
  WriteRankFile(RankFile(folder_, 1, "ready"), config.identity);
  ReportRankLoss(folder_, 1, {.rank = 1, .reason = "no memory"});
  EXPECT_THAT([&] { JoinGloo(config); },
              ThrowsMessage<RankLostError>("rank 1 of 2 is lost, and the engine ends: no memory"));
}

// Rank 0 over Gloo itself, which claims to send more than memory has.
TEST_P(Ranks, OneThatSendsAWrongLengthIsLost) {
  std::thread liar([this] {
    const GlooConfig config = ConfigOf(0, 2);
    WriteRankFile(RankFile(folder_, 0, "ready"), config.identity);
    gloo::transport::tcp::attr address;
    address.hostname = config.address;
    auto device = gloo::transport::tcp::CreateDevice(address);
    gloo::rendezvous::FileStore store(folder_);
    gloo::rendezvous::Context gathers(0, 2), messages(0, 2);
    for (auto [name, context] : {std::pair("gathers", &gathers), std::pair("messages", &messages)}) {
      gloo::rendezvous::PrefixStore names(name, store);
      context->connectFullMesh(names, device);
    }
    std::vector<uint64_t> first(512, uint64_t{1} << 62);
    const auto buffer = messages.createUnboundBuffer(first.data(), first.size() * sizeof(uint64_t));
    buffer->send(1, 1);
    buffer->waitSend(std::chrono::seconds(60));
  });
  const auto ranks = JoinGloo(ConfigOf(1, 2));
  std::vector<uint8_t> message;
  EXPECT_THAT([&] { ranks->Broadcast(message); },
              Throws<RankLostError>(AllOf(
                  Property(&RankLostError::Rank, 0),
                  Property(&RankLostError::Reason, HasSubstr("a message of 4611686018427387904 bytes is too long")))));
  liar.join();
}

INSTANTIATE_TEST_SUITE_P(BusyPoll, Ranks, testing::Bool());

}  // namespace
}  // namespace kvanta::parallel
