// kill -9 at random points while an engine writes to the folder of its prefix cache.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "engine/stored_prefixes.h"

namespace kvanta::engine {
namespace {

#ifdef KVANTA_SANITIZED
constexpr int kKills = 12;
#else
constexpr int kKills = 200;
#endif
constexpr int kPrompts = 64;
constexpr int64_t kPromptTokens = 100, kCachedTokens = 96;

// Prompts of one life, which share beginnings with those of others.
std::vector<int32_t> PromptOf(uint64_t life, int number) {
  std::mt19937_64 random(1000 + life % 10);
  std::vector<int32_t> tokens = RandomTokens(random, 32);
  std::mt19937_64 tail(life * kPrompts + static_cast<uint64_t>(number));
  const auto rest = RandomTokens(tail, kPromptTokens - 32);
  tokens.insert(tokens.end(), rest.begin(), rest.end());
  return tokens;
}

// Computes prompts and reports, one byte each, which are certainly on disk; until it is killed.
[[noreturn]] void Live(const std::string& folder, uint64_t life, int report) {
  Engine engine(StoredConfig(folder));
  for (int i = 0; i < kPrompts; ++i) {
    StoredLogits(engine, PromptOf(life, i), 32);
    if (i % 3 != 0) continue;  // the others are on their way
    engine.FlushPrefixCache();
    const char done = static_cast<char>(i);
    if (::write(report, &done, 1) != 1) ::_exit(1);
  }
  for (;;) ::pause();
}

TEST(DiskCrash, KillsLoseOnlyUnfinishedPages) {
  const weights::TempFolder folder;
  EngineConfig cold_config = StoredConfig("");
  cold_config.enable_prefix_caching = false;
  std::mt19937_64 random(42);
  int found = 0;
  int unfinished = 0;
  for (uint64_t life = 0; life < kKills; ++life) {
    int report[2];
    ASSERT_EQ(::pipe(report), 0);
    const pid_t child = ::fork();  // while this process has no other threads
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(report[0]);
      Live(folder.Path(), life, report[1]);
    }
    ::close(report[1]);
    char last = 0;
    ASSERT_EQ(::read(report[0], &last, 1), 1);  // it runs
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 12000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    char more = 0;
    while (::read(report[0], &more, 1) == 1) last = more;
    ::close(report[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    Engine engine(StoredConfig(folder.Path()));
    Engine cold(cold_config);
    for (int number = last; number <= std::min(last + 1, kPrompts - 1); ++number) {
      const std::vector<int32_t> tokens = PromptOf(life, number);
      const Scored run = StoredLogits(engine, tokens, 64);
      ASSERT_TRUE(SameRows(ColdLogits(cold, tokens), run.logits, run.cached)) << "life " << life;
      if (number == last) {
        ASSERT_EQ(run.cached, kCachedTokens) << "life " << life << ": pages that were written are lost";
        ++found;
      } else if (run.cached < kCachedTokens) {
        ++unfinished;
      }
    }
    ASSERT_EQ(engine.Stats().disk.damaged_files, 0) << "life " << life;
  }
  EXPECT_EQ(found, kKills);
  EXPECT_GT(unfinished, kKills / 20) << "the kills came too late to interrupt anything";
  for (const CacheFolderEntry& entry : VerifyCacheFolder(folder.Path())) EXPECT_TRUE(entry.damaged.empty());
}

}  // namespace
}  // namespace kvanta::engine
