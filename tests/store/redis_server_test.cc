// Records in a Redis server that behaves, and in one that does not: nothing that it sends is used by mistake, takes
// long or needs much memory.
#include <gtest/gtest.h>

#include "base/clock.h"
#include "kvanta/error.h"
#include "store/fake_clock.h"
#include "store/fake_redis.h"
#include "store/file_system.h"
#include "store/redis_server.h"

namespace kvanta::store {
namespace {

using Outcome = ReadResult::Outcome;

constexpr size_t kPayload = 500;

class RedisServerTest : public testing::Test {
 protected:
  std::unique_ptr<RecordBackend> Make(int64_t ttl = 0, double answer_seconds = 1) const {
    return MakeRedisServer({.url = fake_.Url(),
                            .ttl_seconds = ttl,
                            .identity = identity_,
                            .max_record_bytes = kPageHeaderBytes + 516,
                            .now = clock_,
                            .answer_seconds = answer_seconds});
  }

  std::vector<RecordId> Ids(int count) const {
    std::vector<RecordId> ids;
    for (int i = 0; i < count; ++i) ids.push_back({IdentityKey(std::to_string(i)), i % 3, cache::PageKind::kQuantized});
    return ids;
  }

  std::string Write(RecordBackend& server, const std::vector<RecordId>& ids) const {
    std::vector<std::vector<uint8_t>> headers;
    std::vector<RecordToWrite> records;
    for (const RecordId& id : ids) headers.push_back(EncodePageHeader(identity_, id, tokens_, payload_));
    const auto content =
        std::make_shared<const RecordContent>(RecordContent{.tokens = tokens_, .payload = OwnBytes(payload_)});
    for (size_t i = 0; i < ids.size(); ++i) {
      records.push_back({.use = {.id = ids[i]}, .header = headers[i], .content = content});
    }
    return server.Write(records).error;
  }

  // Answers one kind of command.
  void Answer(const std::string& name, const std::string& bytes) {
    fake_.SetAnswer([=](const FakeRedis::Words& words) -> std::optional<std::string> {
      return words[0] == name ? std::optional(bytes) : std::nullopt;
    });
  }

  size_t Count(const std::string& name) {
    size_t count = 0;
    for (const FakeRedis::Words& words : fake_.Commands()) count += words[0] == name ? 1 : 0;
    return count;
  }

  FakeRedis fake_;
  FakeClock clock_;
  PageKey identity_ = IdentityKey("model");
  std::vector<int32_t> tokens_ = {1, 2, 3, 4};
  std::vector<uint8_t> payload_ = std::vector<uint8_t>(kPayload, 7);
};

TEST_F(RedisServerTest, KeepsRecordsForOtherMachines) {
  const std::vector<RecordId> ids = Ids(40);
  const auto first = Make();
  EXPECT_FALSE(first->IsKnown(ids[0]));
  EXPECT_EQ(Write(*first, ids), "");
  EXPECT_TRUE(first->IsKnown(ids[39]));
  EXPECT_EQ(fake_.Values().size(), 40u);
  EXPECT_EQ(fake_.Values().begin()->first.find("kvanta:" + IdentityName(identity_) + ":"), 0u);
  const auto second = Make();
  std::vector<RecordId> asked = Ids(41);
  std::vector<uint8_t> found(41, 0);
  EXPECT_EQ(second->Find(asked, found), "");
  EXPECT_EQ(std::count(found.begin(), found.end(), 1), 40);
  EXPECT_EQ(found[40], 0);
  const std::vector<ReadResult> results = second->Read(asked);
  for (size_t i = 0; i < 40; ++i) {
    ASSERT_EQ(results[i].outcome, Outcome::kRead);
    EXPECT_EQ(ReadRecord(results[i].bytes, identity_, ids[i], tokens_, kPayload).fault, "");
  }
  EXPECT_EQ(results[40].outcome, Outcome::kMissing);
  EXPECT_EQ(Count("MGET"), 3u) << "several keys each";
  EXPECT_EQ(Write(*second, ids), "");
  EXPECT_EQ(Count("SET"), 40u) << "what is there is not written again";
  second->Remove(ids);
  EXPECT_TRUE(fake_.Values().empty());
}

TEST_F(RedisServerTest, TimesToLiveAreSetAndRenewed) {
  const std::vector<RecordId> ids = Ids(1);
  const auto server = Make(90);
  Write(*server, ids);
  const FakeRedis::Words set = fake_.Commands().back();
  ASSERT_EQ(set.size(), 5u);
  EXPECT_EQ(set[3] + " " + set[4], "EX 90");
  const std::vector<RecordUse> uses = {{.id = ids[0]}};
  server->Touch(uses);
  EXPECT_EQ(fake_.Commands().back()[0] + fake_.Commands().back()[2], "EXPIRE90");
  EXPECT_TRUE(server->IsKnown(ids[0]));
  EXPECT_FALSE(server->NeedsTouch(ids[0])) << "used a moment ago";
  fake_.SetValues({});
  server->Touch(uses);
  EXPECT_FALSE(server->IsKnown(ids[0])) << "evicted: to be written again";
}

TEST_F(RedisServerTest, PinnedRecordsExpireNoEarlierThanTheirPins) {
  const std::vector<RecordId> ids = Ids(1);
  const std::vector<RecordUse> uses = {{.id = ids[0]}};
  const auto pin = [&](RecordBackend& server, int64_t seconds) {
    const std::vector<int64_t> until_ns = {WallClockNs() + seconds * 1'000'000'000};
    server.Pin(uses, until_ns);
  };
  const auto server = Make(90);
  server->Read(ids);  // connects: what was known before would be forgotten
  Write(*server, ids);
  const size_t sent = fake_.Commands().size();
  pin(*server, 80);
  EXPECT_EQ(fake_.Commands().size(), sent) << "it stays for as long anyway";
  pin(*server, 600);
  EXPECT_EQ(fake_.Commands().back()[0] + fake_.Commands().back()[2], "EXPIRE600");
  EXPECT_EQ(server->Read(ids)[0].outcome, Outcome::kRead);
  EXPECT_FALSE(server->NeedsTouch(ids[0])) << "a use would shorten the pin";
  const auto other = Make(90);
  other->Read(ids);
  EXPECT_TRUE(other->NeedsTouch(ids[0]));
  pin(*other, 80);
  EXPECT_EQ(fake_.Commands().back()[0] + fake_.Commands().back()[2], "EXPIRE90");
  const auto lasting = Make();
  lasting->Read(ids);
  pin(*lasting, 600);
  EXPECT_EQ(fake_.Commands().back()[0], "TOUCH") << "nothing expires";
}

TEST_F(RedisServerTest, RepliesThatAreNoneAreNeverUsed) {
  const std::vector<RecordId> ids = Ids(2);
  Write(*Make(), ids);
  for (const std::string& reply :
       {std::string("-LOADING Redis is loading the dataset in memory\r\n"), std::string("-ERR\r\n"),
        std::string(":5\r\n"), std::string("$-1\r\n"), std::string("*0\r\n"), std::string("*1\r\n$1\r\nx\r\n"),
        std::string("*-1\r\n"), std::string("*2147483647\r\n"), std::string("*99999999999\r\n"), std::string("*-7\r\n"),
        std::string("*2\r\n$-5\r\n$1\r\nx\r\n"), std::string("no reply\r\n"), std::string("\r\n\r\n"),
        std::string("\0\0\0\0\r\n", 6), "*2\r\n$99999999999\r\n" + std::string(100'000, 'x'), std::string(100'000, '*'),
        "$100000\r\n" + std::string(100'000, 'x') + "\r\n",
        std::string("*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n")}) {
    Answer("MGET", reply);
    const auto server = Make(0, 60);
    const double start = Now();
    for (const ReadResult& result : server->Read(ids)) {
      EXPECT_EQ(result.outcome, Outcome::kFailed) << reply.substr(0, 40);
      EXPECT_NE(result.fault, "") << reply.substr(0, 40);
      EXPECT_LT(result.fault.size(), 400u);
    }
    EXPECT_LT(Now() - start, 60) << "waits for the rest of " << reply.substr(0, 40);
  }
}

TEST_F(RedisServerTest, ValuesThatAreNoneAreMissing) {
  const std::vector<RecordId> ids = Ids(2);
  Write(*Make(), ids);
  for (const char* reply : {"*2\r\n:1\r\n$-1\r\n", "*2\r\n*0\r\n+x\r\n", "*2\r\n-ERR\r\n$-1\r\n"}) {
    Answer("MGET", reply);
    for (const ReadResult& result : Make()->Read(ids)) EXPECT_EQ(result.outcome, Outcome::kMissing) << reply;
  }
}

TEST_F(RedisServerTest, LongAndForeignValuesAreNotFoundAndReplaced) {
  const std::vector<RecordId> ids = Ids(2);
  const auto server = Make();
  fake_.SetValues({{server->NameOf(ids[0]), std::string(2000, 'x')}});
  std::vector<uint8_t> found(2, 0);
  EXPECT_NE(server->Find(ids, found).find("2000 bytes"), std::string::npos);
  EXPECT_EQ(found[0], 0);
  EXPECT_EQ(Write(*server, ids), "");
  EXPECT_EQ(server->Find(ids, found), "");
  EXPECT_EQ(found, (std::vector<uint8_t>{1, 1}));
  Answer("STRLEN", "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n");
  std::vector<uint8_t> none(2, 0);
  EXPECT_NE(server->Find(ids, none).find("WRONGTYPE"), std::string::npos);
  EXPECT_EQ(none, (std::vector<uint8_t>{0, 0}));
}

TEST_F(RedisServerTest, ErrorsOfWritesAreTold) {
  Answer("SET", "-OOM command not allowed when used memory > 'maxmemory'.\r\n");
  const auto server = Make();
  EXPECT_NE(Write(*server, Ids(2)).find("OOM command not allowed"), std::string::npos);
  EXPECT_FALSE(server->IsKnown(Ids(1)[0]));
}

// A stall costs its time once; until the pause is over, nothing waits.
TEST_F(RedisServerTest, ErrorsOfClustersAndOfRightsAreTold) {
  const std::string hint = " (a Redis Cluster is not supported: give one server)";
  const std::string moved = "MOVED 3999 127.0.0.1:6381";
  const std::string cross = "CROSSSLOT Keys in request don't hash to the same slot";
  const std::string denied = "NOPERM User kvanta has no permissions to run the 'x' command";
  for (const auto& [text, shown] : {std::pair(moved, moved + hint), {cross, cross + hint}, {denied, denied}}) {
    const std::string reply = "-" + text + "\r\n";
    Answer("SET", reply);
    const auto server = Make();
    EXPECT_EQ(Write(*server, Ids(2)), shown);
    EXPECT_FALSE(server->IsKnown(Ids(1)[0]));
    Answer("STRLEN", reply);
    std::vector<uint8_t> found(1, 0);
    EXPECT_NE(server->Find(Ids(1), found).find(shown), std::string::npos);
    EXPECT_EQ(found[0], 0);
    Answer("MGET", reply);
    const ReadResult result = server->Read(Ids(1))[0];
    EXPECT_EQ(result.outcome, Outcome::kFailed);
    EXPECT_EQ(result.fault, shown);
  }
}

TEST_F(RedisServerTest, StallsAndTruncatedRepliesEndInTime) {
  const std::vector<RecordId> ids = Ids(2);
  Write(*Make(), ids);
  for (const char* reply : {"", "*2\r\n$600\r\nabc"}) {
    Answer("MGET", reply);
    for (const bool used : {false, true}) {
      const size_t before = Count("MGET");
      const auto server = Make(0, 0.1);
      std::vector<uint8_t> found(2, 0);
      if (used) server->Find(ids, found);
      const double start = Now();
      EXPECT_EQ(server->Read(ids)[0].outcome, Outcome::kFailed);
      EXPECT_GT(Now() - start, 0.09);
      EXPECT_EQ(server->Read(ids)[0].outcome, Outcome::kFailed);
      EXPECT_EQ(server->Find(ids, found), "") << "told once";
      EXPECT_EQ(Count("MGET"), before + 1) << "sent once, on a connection that had answered, too";
    }
  }
}

TEST_F(RedisServerTest, ClosedConnectionsAreMadeAgainAtOnce) {
  const std::vector<RecordId> ids = Ids(2);
  const auto server = Make();
  Write(*server, ids);
  std::vector<uint8_t> found(2, 0);
  server->Find(ids, found);
  for (int i = 0; i < 3; ++i) {
    std::ranges::fill(found, uint8_t{0});
    fake_.CloseNext();
    EXPECT_EQ(server->Find(ids, found), "") << "the second command's reply never came";
    EXPECT_EQ(found, (std::vector<uint8_t>{1, 1}));
  }
  CacheTierStats stats;
  server->Describe(stats);
  EXPECT_EQ(stats.connects, 5);
}

TEST_F(RedisServerTest, RefusedConnectionsAreTriedAgainLater) {
  const std::vector<RecordId> ids = Ids(1);
  const auto server = Make();
  Write(*server, ids);
  fake_.Stop();
  EXPECT_EQ(server->Read(ids)[0].fault, "Connection refused");
  fake_.Restart();
  EXPECT_EQ(server->Read(ids)[0].outcome, Outcome::kFailed) << "a pause of a second";
  clock_.Advance(1.05);
  EXPECT_EQ(server->Read(ids)[0].outcome, Outcome::kMissing);
  EXPECT_FALSE(server->IsKnown(ids[0])) << "the new server has nothing";
  EXPECT_EQ(Write(*server, ids), "");
  EXPECT_EQ(server->Read(ids)[0].outcome, Outcome::kRead);
}

TEST_F(RedisServerTest, AuthenticatesAndSelectsWithoutTellingThePassword) {
  const std::string at = fmt::format("@127.0.0.1:{}", fake_.Port());
  const auto make = [&](const std::string& user) {
    return MakeRedisServer({.url = "redis://" + user + at + "/5", .identity = identity_, .max_record_bytes = 1000});
  };
  EXPECT_EQ(Write(*make("us%20er:sec%3Aret"), Ids(1)), "");
  EXPECT_EQ(fake_.Commands()[0], (FakeRedis::Words{"AUTH", "us er", "sec:ret"}));
  EXPECT_EQ(fake_.Commands()[1], (FakeRedis::Words{"SELECT", "5"}));
  // An old server quotes commands that it does not know.
  Answer("AUTH", "-ERR unknown command `AUTH`, with args beginning with: `secret`\r\n");
  const auto server = make(":secret");
  const std::string error = Write(*server, Ids(1));
  EXPECT_EQ(error, "AUTH was refused: ERR");
  EXPECT_EQ(server->Name(), fmt::format("kv_store = 'redis://***@127.0.0.1:{}/5'", fake_.Port()));
}

TEST_F(RedisServerTest, PlainServersAreNoneOfTls) {
  const auto server =
      MakeRedisServer({.url = fmt::format("rediss://127.0.0.1:{}", fake_.Port()), .answer_seconds = 60});
  const double start = Now();
  EXPECT_NE(Write(*server, Ids(1)), "");
  EXPECT_LT(Now() - start, 60) << "waits for an answer";
}

}  // namespace
}  // namespace kvanta::store
