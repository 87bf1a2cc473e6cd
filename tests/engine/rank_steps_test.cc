// Steps of rank 0 as another rank reads them: one that is not valid ends the rank, and is read no further.
#include "runner/rank_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "engine/components.h"
#include "engine/ranks.h"
#include "engine/requests.h"
#include "kvanta/rank_lost_error.h"
#include "runner/runner.h"

namespace kvanta::engine {
namespace {

using testing::HasSubstr;
using Message = std::vector<uint8_t>;

// Keeps rank 0's messages.
class Recorder final : public parallel::Communicator {
 public:
  int Size() const noexcept override { return 2; }
  void Broadcast(Message& message) override { messages.push_back(message); }

  std::vector<Message> messages;
};

// Rank 1, to which `messages` come, and then the end.
class Player final : public parallel::Communicator {
 public:
  explicit Player(std::vector<Message> messages) : messages_(std::move(messages)) {}
  int Rank() const noexcept override { return 1; }
  int Size() const noexcept override { return 2; }
  void Broadcast(Message& message) override { message = messages_[next_++]; }

 private:
  const std::vector<Message> messages_;
  size_t next_ = 0;
};

class RankStepsTest : public testing::Test {
 protected:
  RankStepsTest() {
    cache::PagePool own(components_.ops->device(), components_.layout, {.budget_bytes = 1 << 20});
    Recorder recorder;
    {
      runner::StepSender sender(recorder, own, runner::Division::kTensorParallel);
      const std::vector<int32_t> tokens(20, 3);
      cache::BlockTable table;
      for (int page = 0; page < 2; ++page) {
        table.push_back({.quantized = own.Allocate(0, cache::PageKind::kQuantized),
                         .exact = own.Allocate(0, cache::PageKind::kExact)});
      }
      const cache::PageRef* tables[] = {table.data()};
      const runner::RunItem item{.tokens = tokens, .start = 0, .pages = tables, .first_output = 19};
      sender.SendForward({&item, 1});
      sender.SendLogits(0, 1, false);
    }
    forward_ = recorder.messages.at(0);
    logits_ = recorder.messages.at(1);
    end_ = recorder.messages.at(2);
  }

  // The reason for which the rank ended; "" for the end that rank 0 sent.
  std::string Follow(const Message& message) {
    Player ranks({message, end_});
    try {
      runner::FollowSteps(ranks, pool_, runner_, *backend_, components_.model->ops().threads());
    } catch (const RankLostError& error) {
      EXPECT_EQ(error.Rank(), 0);
      return error.Reason();
    } catch (const InputError& error) {  // MakePlan's
      return error.what();
    }
    return "";
  }

  EngineComponents components_ = LoadComponents(TinyConfig(Model(), "int8"));
  cache::PagePool pool_{components_.ops->device(), components_.layout, {.budget_bytes = 1 << 20, .borrowed = true}};
  runner::Runner runner_{*components_.model, 64, 4};
  std::unique_ptr<attention::Backend> backend_ =
      components_.make_backend(pool_, {.layers = components_.model->AttentionLayers(), .scales = components_.scales});
  Message forward_, logits_, end_;
};

TEST_F(RankStepsTest, AreRepeated) {
  EXPECT_EQ(Follow(forward_), "");
  EXPECT_EQ(Follow(logits_), "");
}

TEST_F(RankStepsTest, AMessageThatEndsEarlyIsRefused) {
  for (const Message& whole : {forward_, logits_}) {
    for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
      EXPECT_NE(Follow({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(bytes)}), "") << bytes;
    }
  }
}

// Every number of 8 bytes in turn: counts of records and tokens, starts and rows among them.
TEST_F(RankStepsTest, LengthsThatAreNotThereAreRefused) {
  using Limits = std::numeric_limits<int64_t>;
  const auto with = [](Message message, size_t at, int64_t value) {
    std::memcpy(message.data() + at, &value, sizeof(value));
    return message;
  };
  for (const int64_t value : {int64_t{-1}, Limits::min(), Limits::max(), int64_t{1} << 40, int64_t{1000}}) {
    for (const size_t at : {1, 9, 17, 25}) {  // released records, start, tokens, first output
      EXPECT_NE(Follow(with(forward_, at, value)), "") << at << ": " << value;
    }
    for (const size_t at : {1, 9}) EXPECT_THAT(Follow(with(logits_, at, value)), HasSubstr("rows of logits"));
  }
  EXPECT_THAT(Follow({7}), HasSubstr("its kind"));
}

TEST_F(RankStepsTest, ChangesOfOtherRecordsAreRefused) {
  const auto with = [this](const cache::RecordChange& change) {
    Message message = forward_;
    constexpr int64_t kCount = 1;
    std::memcpy(message.data() + 1, &kCount, sizeof(kCount));
    const auto* bytes = reinterpret_cast<const uint8_t*>(&change);
    message.insert(message.begin() + 1 + sizeof(kCount), bytes, bytes + sizeof(change));
    return Follow(message);
  };
  EXPECT_EQ(with({.record = {.group = 0, .kind = cache::PageKind::kQuantized, .page = 1}}), "");
  EXPECT_THAT(with({.record = {.group = 1, .page = 1}}), HasSubstr("a record of the cache"));
  EXPECT_THAT(with({.record = {.group = 0, .page = 1 << 30}}), HasSubstr("a record of the cache"));
  // The model has no states.
  EXPECT_THAT(with({.kind = cache::RecordChangeKind::kRoundState,
                    .record = {.group = 0, .kind = cache::PageKind::kQuantized, .page = 1},
                    .coded = 1}),
              HasSubstr("a state of the cache"));
  EXPECT_THAT(with({.kind = cache::RecordChangeKind{9}, .record = {.group = 0, .page = 1}}),
              HasSubstr("the change of a record"));
}

TEST_F(RankStepsTest, ANumberOfAnotherLengthIsRefused) {
  Player whole(std::vector<Message>(1, Message(8, 1)));
  EXPECT_EQ(ValueOfRank0(whole, 0), 0x0101010101010101);
  for (const size_t bytes : {0, 7, 9}) {
    Player ranks(std::vector<Message>(1, Message(bytes)));
    EXPECT_THROW(ValueOfRank0(ranks, 0), RankLostError) << bytes;
  }
}

}  // namespace
}  // namespace kvanta::engine
