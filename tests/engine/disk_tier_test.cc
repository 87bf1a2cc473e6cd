// The prefix cache on disk: a hit gives the bits of a cold run, whatever happened to the files in between.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include "engine/stored_prefixes.h"

namespace kvanta::engine {
namespace {

class DiskTierFormats : public testing::TestWithParam<FormatCase> {};

// Random prefixes, chunkings and restarts: rows after the hit have the bits of a run without a cache.
TEST_P(DiskTierFormats, AHitAfterARestartHasTheBitsOfAColdRun) {
  const weights::TempFolder folder;
  EngineConfig cold_config = ConfigOf(GetParam());
  cold_config.enable_prefix_caching = false;
  Engine cold(cold_config);
  std::mt19937_64 random(500);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 96));
  int hits = 0;
  for (int restart = 0; restart < 4; ++restart) {
    Engine engine(StoredConfig(GetParam(), folder.Path()));
    for (int i = 0; i < 6; ++i) {
      std::vector<int32_t> tokens = stems[random() % stems.size()];
      tokens.resize(random() % 64 + 33);
      const auto tail = RandomTokens(random, static_cast<int64_t>(random() % 20));
      tokens.insert(tokens.end(), tail.begin(), tail.end());
      engine.ResetPrefixCache();
      engine.FlushPrefixCache();
      const Scored run = StoredLogits(engine, tokens, static_cast<int>(random() % 64 + 1));
      ASSERT_TRUE(SameRows(ColdLogits(cold, tokens), run.logits, run.cached))
          << "restart " << restart << ", case " << i << ": " << run.cached << " of " << tokens.size() << " cached";
      hits += run.cached > 0 ? 1 : 0;
    }
    EXPECT_EQ(engine.Stats().disk.damaged_files, 0);
  }
  EXPECT_GT(hits, 8);
}

// Requests in batches, many at once, with their histories on disk: tokens and log-probabilities as if alone.
TEST_P(DiskTierFormats, RequestsInBatchesHaveTheBitsOfColdOnes) {
  const weights::TempFolder folder;
  EngineConfig alone_config = ConfigOf(GetParam());
  alone_config.enable_prefix_caching = false;
  alone_config.max_num_seqs = 1;
  Engine alone(alone_config);
  std::mt19937_64 random(600);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * alone_config.page_size));
  int number = 0;
  int64_t loaded = 0;
  for (int round = 0; round < 4; ++round) {
    EngineConfig config = StoredConfig(GetParam(), folder.Path());
    config.kv_cache_memory_bytes = ScarceMemory(PlanCacheBytes(config));
    Engine crowd(config);
    std::vector<Request> requests;
    std::map<std::string, Collected> results;
    std::vector<RequestOutput> outputs;
    for (int i = 0; i < 16; ++i) requests.push_back(RandomRequest(random, stems, number++));
    size_t added = 0;
    while (true) {
      while (added < requests.size() && random() % 3 != 0) crowd.Add(requests[added++]);
      if (!crowd.Step(outputs) && added == requests.size()) break;
      Collect(outputs, results);
    }
    loaded += crowd.Stats().disk.hit_tokens;
    EXPECT_EQ(crowd.Stats().loading, 0);
    for (const Request& request : requests) {
      const Collected want = RunOne(alone, request);
      const Collected& got = results[request.id];
      ASSERT_EQ(got.error, "");
      ASSERT_EQ(got.tokens, want.tokens) << "request " << request.id;
      ASSERT_TRUE(Same(got.logprobs, want.logprobs)) << "request " << request.id;
    }
    crowd.ResetPrefixCache();
    EXPECT_EQ(crowd.Stats().cache_used_bytes, 0) << "references leaked";
  }
  EXPECT_GT(loaded, 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, DiskTierFormats, testing::ValuesIn(kCases), NameOf);

// A request that was preempted, and whose pages were evicted from memory since, finds them on disk.
class DiskTierPreemptions : public testing::TestWithParam<FormatCase> {};

TEST_P(DiskTierPreemptions, FindTheirPages) {
  const weights::TempFolder folder;
  EngineConfig config = StoredConfig(GetParam(), folder.Path());
  config.max_num_batched_tokens = 2 * config.page_size - 1;  // too few to measure: all that is found is loaded
  config.kv_cache_memory_bytes = ScarceMemory(PlanCacheBytes(config));
  Engine crowd(config);
  EngineConfig alone_config = ConfigOf(GetParam());
  alone_config.enable_prefix_caching = false;
  Engine alone(alone_config);
  std::mt19937_64 random(700);
  std::vector<Request> requests;
  for (int i = 0; i < 6; ++i) {
    requests.push_back(GreedyRequest(std::to_string(i), RandomTokens(random, 40), 80));
    requests.back().sampling.ignore_eos = true;
    crowd.Add(requests.back());
  }
  std::map<std::string, Collected> results;
  std::vector<RequestOutput> outputs;
  while (crowd.Step(outputs)) {
    Collect(outputs, results);
    crowd.FlushPrefixCache();  // pages of a model so small are preempted before they are written
  }
  EXPECT_GT(crowd.Stats().preemptions, 0);
  EXPECT_GT(crowd.Stats().disk.hit_tokens, 0);
  for (const Request& request : requests) {
    ASSERT_EQ(results.at(request.id).error, "");
    ASSERT_EQ(results.at(request.id).tokens, RunOne(alone, request).tokens) << request.id;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, DiskTierPreemptions,
                         testing::Values(FormatCase{"bf16", false}, FormatCase{"int4", false},
                                         FormatCase{"mla_fp8", false, true}),
                         NameOf);

TEST_F(DiskTierTest, AnotherFormatModelSaltOrPageSizeFindsNothing) {
  Fill();
  for (const char* format : {"int8", "bf16", "int4+hadamard"}) {
    Engine other(StoredConfig({format, false}, folder_.Path()));
    EXPECT_EQ(StoredLogits(other, tokens_).cached, 0) << format;
  }
  EngineConfig pages = StoredConfig(folder_.Path());
  pages.page_size = 32;
  Engine other_pages(pages);
  EXPECT_EQ(StoredLogits(other_pages, tokens_).cached, 0);
  const TinyModel other_weights({}, 0.5F);
  EngineConfig model = StoredConfig(folder_.Path());
  model.model = other_weights.Path();
  Engine other_model(model);
  EXPECT_EQ(StoredLogits(other_model, tokens_).cached, 0);
  Engine same(StoredConfig(folder_.Path()));
  Request salted = GreedyRequest("salted", tokens_);
  salted.cache_salt = "tenant";
  EXPECT_EQ(RunOne(same, salted).cached_tokens, 0);
  EXPECT_EQ(RunOne(same, GreedyRequest("plain", tokens_)).cached_tokens, 96);
  same.FlushPrefixCache();
  Engine again(StoredConfig(folder_.Path()));
  salted.id = "again";
  EXPECT_EQ(RunOne(again, salted).cached_tokens, 96) << "its own pages are found";
}

// Every kind of damage to every file: what is whole is used, what is not is removed, and no bit differs.
TEST_F(DiskTierTest, DamagedFilesAreNeverUsed) {
  const std::vector<float> cold = Fill();
  std::mt19937_64 random(7);
  const auto files = RecordFiles(folder_.Path());
  ASSERT_GE(files.size(), 6u);
  const auto read = [](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const auto write = [](const fs::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  };
  std::map<fs::path, std::string> whole;
  for (const fs::path& path : files) whole[path] = read(path);
  for (int i = 0; i < kDamages; ++i) {
    for (const auto& [path, bytes] : whole) write(path, bytes);
    const fs::path& victim = files[random() % files.size()];
    std::string bytes = whole[victim];
    switch (i % 6) {
      case 0:
        bytes[random() % bytes.size()] ^= static_cast<char>(1U << (random() % 8));
        break;
      case 1:
        bytes.resize(random() % bytes.size());
        break;
      case 2:
        bytes += "x";
        break;
      case 3:
        bytes[8] = 2;  // another version
        break;
      case 4:  // another page's record under this name
        bytes = whole[files[(static_cast<size_t>(std::find(files.begin(), files.end(), victim) - files.begin()) + 1) %
                            files.size()]];
        break;
      case 5:  // torn: the end was never written
        std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(random() % bytes.size()), bytes.end(), '\0');
        break;
    }
    if (bytes == whole[victim]) continue;
    write(victim, bytes);
    Engine engine(StoredConfig(folder_.Path()));
    const Scored run = StoredLogits(engine, tokens_);
    EXPECT_TRUE(SameRows(cold, run.logits, run.cached)) << "damage " << i;
    EXPECT_LT(run.cached, 96) << "damage " << i;
    EXPECT_EQ(engine.Stats().disk.damaged_files, 1) << "damage " << i;
    engine.FlushPrefixCache();
    EXPECT_EQ(read(victim), whole[victim]) << "written again";
  }
}

TEST_F(DiskTierTest, StrangeThingsInPlaceOfFilesAreSkipped) {
  const std::vector<float> cold = Fill();
  const auto files = RecordFiles(folder_.Path());
  fs::remove(files[0]);
  ASSERT_EQ(::mkfifo(files[0].c_str(), 0600), 0);
  fs::remove(files[1]);
  fs::create_symlink("/dev/zero", files[1]);
  fs::remove(files[2]);
  fs::create_directory(files[2]);
  Engine engine(StoredConfig(folder_.Path()));
  const Scored run = StoredLogits(engine, tokens_);
  EXPECT_TRUE(SameRows(cold, run.logits, run.cached));
}

TEST_F(DiskTierTest, FilesAreOnlyTheOwnersAndForeignOnesStay) {
  const std::string inner = folder_.Path() + "/new/cache";
  fs::create_directories(inner + "/mine/aa");
  fs::remove_all(inner);
  EngineConfig config = StoredConfig(inner);
  Fill(config);
  struct stat status = {};
  ASSERT_EQ(::stat(inner.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0700U);
  ASSERT_EQ(::stat(RecordFiles(inner).front().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  fs::create_directories(inner + "/mine/aa");
  std::ofstream(inner + "/mine/aa/letter.txt") << "dear";
  config.kv_cache_dir_bytes = 3 * 4096;
  { Engine engine(config); }  // evicts
  EXPECT_LT(RecordFiles(inner).size(), 5u);
  EXPECT_GT(ClearCacheFolder(inner), 0);
  EXPECT_TRUE(fs::exists(inner + "/mine/aa/letter.txt"));
  EXPECT_TRUE(ListCacheFolder(inner).empty());
}

TEST_F(DiskTierTest, TheFolderStaysWithinItsBytes) {
  EngineConfig config = StoredConfig(folder_.Path());
  config.kv_cache_dir_bytes = 40 * 4096;
  Engine first(config);
  Engine second(config);
  for (int i = 0; i < 40; ++i) {
    Engine& engine = i % 2 == 0 ? first : second;
    StoredLogits(engine, Tokens(100 + static_cast<uint64_t>(i), 100));
    engine.FlushPrefixCache();
    EXPECT_LE(std::ssize(RecordFiles(folder_.Path())), 44) << "one process's slack at most";
  }
  EXPECT_GT(first.Stats().disk.evictions + second.Stats().disk.evictions, 50);
  // The last prompt is there as a whole: first pages are not evicted before those that depend on them.
  Engine engine(config);
  EXPECT_EQ(StoredLogits(engine, Tokens(139, 100)).cached, 96);
}

// A prefix with a cache_ttl stays, in memory and on disk, while many others come.
TEST_F(DiskTierTest, APrefixIsKeptForItsTime) {
  EngineConfig config = StoredConfig(folder_.Path());
  config.kv_cache_dir_bytes = 40 * 4096;
  config.kv_cache_memory_bytes = ScarceMemory(PlanCacheBytes(config));
  Request request = GreedyRequest("kept", tokens_, 2);
  request.sampling.cache_ttl = 1000;
  EXPECT_THROW(Engine(config).Add(request), InputError) << "no operator has allowed it";
  config.max_cache_ttl = 500;
  Engine engine(config);
  RunOne(engine, request);
  EXPECT_GT(engine.Stats().prefix_pinned_bytes, 0);
  EXPECT_LE(engine.Stats().prefix_pinned_bytes, engine.Stats().cache_budget_bytes / 2);
  for (uint64_t i = 0; i < 30; ++i) {
    RunOne(engine, GreedyRequest("other", Tokens(100 + i, 60), 2));
    engine.FlushPrefixCache();
  }
  EXPECT_GT(engine.Stats().prefix_evictions, 0);
  EXPECT_GT(engine.Stats().disk.evictions, 0);
  EXPECT_GT(engine.Stats().prefix_pinned_bytes, 0);
  request.sampling.cache_ttl = 0;
  EXPECT_EQ(RunOne(engine, request).cached_tokens, 96);
  Engine again(config);
  EXPECT_EQ(RunOne(again, request).cached_tokens, 96);
  Request other = GreedyRequest("other", Tokens(100, 60), 1);
  EXPECT_EQ(RunOne(again, other).cached_tokens, 0);
  for (const double wrong : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    request.sampling.cache_ttl = wrong;
    EXPECT_THROW(engine.Add(request), InputError);
  }
}

TEST_F(DiskTierTest, ListsAndVerifiesWhatIsThere) {
  Fill();
  auto entries = ListCacheFolder(folder_.Path());
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].pages, 6);
  EXPECT_NE(entries[0].identity.find("\"kv_cache_dtype\":\"int4\""), std::string::npos);
  EXPECT_TRUE(VerifyCacheFolder(folder_.Path())[0].damaged.empty());
  std::ofstream(RecordFiles(folder_.Path())[2], std::ios::in | std::ios::ate) << "x";
  entries = VerifyCacheFolder(folder_.Path());
  ASSERT_EQ(entries[0].damaged.size(), 1u);
  EXPECT_THROW(ListCacheFolder(folder_.Path() + "/none"), InputError);
}

TEST_F(DiskTierTest, ADamagedDescriptionIsWrittenAgain) {
  Fill();
  const std::string file = fmt::format("{}/{}/identity.json", folder_.Path(), ListCacheFolder(folder_.Path())[0].name);
  for (const char* damaged : {"", "{}"}) {
    std::ofstream(file) << damaged;
    EXPECT_FALSE(VerifyCacheFolder(folder_.Path())[0].damaged.empty());
    Fill();
    EXPECT_TRUE(VerifyCacheFolder(folder_.Path())[0].damaged.empty());
  }
}

}  // namespace
}  // namespace kvanta::engine
