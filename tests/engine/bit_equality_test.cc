// Batch-invariant numerics: a token's logits have the same bits for any chunks, batch, threads, prefix hits and
// preemptions. Cases are seeded; unused cache memory holds NaN.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "engine/requests.h"
#include "formats/format.h"

namespace kvanta::engine {
namespace {

#ifdef KVANTA_SANITIZED
constexpr int kShare = 10;  // many times slower, and after other faults
#else
constexpr int kShare = 1;
#endif
constexpr int kChunkCases = 500 / kShare;    // per format
constexpr int kPrefixCases = 200 / kShare;   // per format
constexpr int kRequestCases = 320 / kShare;  // per format, over all batches

struct Case {
  const char* format;
  bool windowed;
  bool latents = false;
  bool hybrid = false;  // windows in some layers alone: two KV cache groups
};

const TinyModel& ModelOf(const Case& what) {
  static const TinyModel sliding({.sliding_window = 40});
  static const TinyModel hybrid({.layers = 3, .sliding_window = 24, .full_layers = 1});
  if (what.hybrid) return hybrid;
  return what.latents ? LatentModel() : what.windowed ? sliding : Model();
}

// Every format, mixed sides, mixed layers (exact pages in one layer only), and sliding windows. Sanitizers look for
// faults of memory and threads, which formats share.
#ifdef KVANTA_SANITIZED
const Case kCases[] = {{"bf16", true},           {"k=int8,v=int4", false},    {"int5_g32+exact=2+sink=2", true},
                       {"kivi4+exact=2", false}, {"int4", true, false, true}, {"mla_fp8", false, true}};
#else
const Case kCases[] = {{"fp32", false},
                       {"bf16", false},
                       {"fp16", false},
                       {"fp8_e4m3", false},
                       {"fp8_e5m2", false},
                       {"int8", false},
                       {"int4", false},
                       {"k=int8,v=int4", false},
                       {"int4", true},
                       {"bf16", true},
                       {"int4+exact=2", false},
                       {"int5_g32+exact=2+sink=2", true},
                       {"nvfp4", false},
                       {"k=int6_g32,v=int4_per_token_head", false},
                       {"turboquant_4bit_nc+edges=0", false},
                       {"kivi4+exact=2", false},
                       {"bf16", true, false, true},
                       {"int4", true, false, true},
                       {"int5_g32+exact=2+sink=2", true, false, true},
                       {"kivi4+exact=2", true, false, true},
                       {"bf16", false, true},
                       {"mla_fp8", false, true},
                       {"fp8_e5m2", false, true},
                       {"int8", false, true},
                       {"mla_int4", false, true},
                       {"mla_nvfp4+exact=none", false, true}};
#endif

class BitEquality : public testing::TestWithParam<Case> {
 protected:
  EngineConfig Config() const {
    EngineConfig config = TinyConfig(ModelOf(GetParam()), GetParam().format);
    // Tiles of 32 tokens do not fit pages of 16.
    const formats::Format& keys = formats::Find(KvScheme::Parse(config.kv_cache_dtype).k.format);
    config.page_size = std::max(config.page_size, keys.scaling.token_group);
    return config;
  }
  // Compares bits, so that a NaN would not pass for equal to anything.
  static void ExpectSame(const std::vector<float>& a, const std::vector<float>& b, size_t from, size_t rows) {
    const size_t vocab = a.size() / rows;
    for (size_t row = from; row < rows; ++row) {
      ASSERT_EQ(std::memcmp(a.data() + row * vocab, b.data() + row * vocab, vocab * sizeof(float)), 0)
          << "row " << row << " of " << rows;
      ASSERT_EQ(a[row * vocab], a[row * vocab]) << "NaN";
    }
  }
};

TEST_P(BitEquality, HoldsForAnyChunking) {
  Engine engine(Config());
  EngineConfig threaded = Config();
  threaded.threads = 3;
  Engine other(threaded);
  std::mt19937_64 random(100);
  for (int done = 0; done < kChunkCases;) {
    const auto tokens = RandomTokens(random, static_cast<int64_t>(random() % 100 + 1));
    const auto whole = ColdLogits(engine, tokens);
    for (int i = 0; i < 10; ++i, ++done) {
      const int chunk = i == 0 ? 1 : static_cast<int>(random() % 64 + 1);
      const auto chunked = ColdLogits(i % 4 == 1 ? other : engine, tokens, chunk);
      ExpectSame(whole, chunked, 0, tokens.size());
      if (HasFatalFailure()) FAIL() << "chunks of " << chunk << (i % 4 == 1 ? ", 3 threads" : "");
    }
  }
}

TEST_P(BitEquality, HoldsForPrefixHits) {
  EngineConfig config = Config();
  Engine engine(config);
  config.enable_prefix_caching = false;
  Engine cold(config);
  std::mt19937_64 random(200);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 6; ++i) stems.push_back(RandomTokens(random, 96));
  int hits = 0;
  for (int i = 0; i < kPrefixCases; ++i) {
    std::vector<int32_t> tokens = stems[random() % stems.size()];
    tokens.resize(random() % 96 + 1);
    const auto tail = RandomTokens(random, static_cast<int64_t>(random() % 30));
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    if (tokens.size() > 128) tokens.resize(128);
    std::vector<float> warm(tokens.size() * 96);
    const auto cached = engine.Logits(tokens, static_cast<int>(random() % 64 + 1), warm, true);
    EXPECT_EQ(cached % 16, 0);
    hits += cached > 0 ? 1 : 0;
    ExpectSame(ColdLogits(cold, tokens), warm, static_cast<size_t>(cached), tokens.size());
    if (HasFatalFailure()) FAIL() << "case " << i << ", " << cached << " of " << tokens.size() << " tokens cached";
    if (i % 50 == 49) engine.ResetPrefixCache();
  }
  EXPECT_GT(hits, kPrefixCases / 3);
}

bool Same(const std::vector<std::vector<TokenLogprob>>& a, const std::vector<std::vector<TokenLogprob>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size()) return false;
    for (size_t j = 0; j < a[i].size(); ++j) {
      if (a[i][j].token != b[i][j].token || a[i][j].rank != b[i][j].rank ||
          std::memcmp(&a[i][j].logprob, &b[i][j].logprob, sizeof(float)) != 0) {
        return false;
      }
    }
  }
  return true;
}

// Half of the requests begin with one of the stems, up to some token of it.
Request RandomRequest(std::mt19937_64& random, const std::vector<std::vector<int32_t>>& stems, int number) {
  Request request;
  request.id = std::to_string(number);
  if (random() % 2 == 0) {
    request.prompt = stems[random() % stems.size()];
    request.prompt.resize(random() % request.prompt.size());
  }
  const auto tail = RandomTokens(random, static_cast<int64_t>(random() % 30 + 1));
  request.prompt.insert(request.prompt.end(), tail.begin(), tail.end());
  request.priority = static_cast<int>(random() % 2);
  request.cache_salt = random() % 8 == 0 ? "salt" : "";
  SamplingParams& params = request.sampling;
  params.max_tokens = static_cast<int>(random() % 80 + 1);
  params.ignore_eos = random() % 2 == 0;
  params.logprobs = 2;
  params.temperature = random() % 3 == 0 ? 0.0F : 0.9F;
  if (random() % 3 == 0) params.top_p = 0.8F;
  if (random() % 3 == 0) params.top_k = 10;
  if (random() % 4 == 0) params.repetition_penalty = 1.2F;
  if (random() % 4 == 0) params.frequency_penalty = 0.5F;
  if (random() % 2 == 0) params.seed = random();
  if (random() % 6 == 0) params.prompt_logprobs = 1;
  return request;
}

// Each request alone in an engine without a prefix cache, against the same among others in a cache too small for them:
// tokens and log-probabilities (sums over all logits) have the same bits.
TEST_P(BitEquality, HoldsForAnyBatchAndPreemption) {
  EngineConfig alone_config = Config();
  alone_config.enable_prefix_caching = false;
  alone_config.max_num_seqs = 1;
  Engine alone(alone_config);
  std::mt19937_64 random(300);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * alone_config.page_size));
  int number = 0;
  int64_t preemptions = 0;
  int64_t hits = 0;
  for (int round = 0; number < kRequestCases; ++round) {
    EngineConfig config = Config();
    config.threads = round % 3 + 1;
    config.max_num_batched_tokens = round % 2 == 0 ? 64 : config.page_size + 1 + static_cast<int>(random() % 60);
    config.enable_prefix_caching = round % 4 != 3;
    const CachePlan plan = PlanCacheBytes(config);
    // Room for one sequence of full length, and for the beginnings of a few.
    config.kv_cache_memory_bytes = 10 * plan.page_bytes + 5 * plan.exact_pages_per_sequence * plan.exact_page_bytes;
    Engine crowd(config);
    std::vector<Request> requests;
    std::map<std::string, Collected> results;
    std::vector<RequestOutput> outputs;
    for (int i = 0; i < 20; ++i) requests.push_back(RandomRequest(random, stems, number++));
    size_t added = 0;
    while (true) {
      while (added < requests.size() && random() % 3 != 0) crowd.Add(requests[added++]);
      if (!crowd.Step(outputs) && added == requests.size()) break;
      Collect(outputs, results);
    }
    preemptions += crowd.Stats().preemptions;
    hits += crowd.Stats().cached_tokens;
    for (const Request& request : requests) {
      const Collected& got = results[request.id];
      const Collected want = RunOne(alone, request);
      ASSERT_EQ(got.error, "");
      ASSERT_EQ(got.tokens, want.tokens) << "request " << request.id;
      ASSERT_EQ(got.finish, want.finish);
      ASSERT_TRUE(Same(got.logprobs, want.logprobs)) << "request " << request.id;
      ASSERT_TRUE(Same(got.prompt_logprobs, want.prompt_logprobs)) << "request " << request.id;
    }
    crowd.ResetPrefixCache();
    EXPECT_EQ(crowd.Stats().cache_used_bytes, 0) << "references leaked";
  }
  if (kShare > 1) return;                             // how often either happens in few rounds is chance
  EXPECT_GT(preemptions, GetParam().hybrid ? 2 : 5);  // windows leave more room
  EXPECT_GT(hits, 50);
}

// A test that could not see a difference would be worthless: other formats and other tokens must give other bits.
TEST_P(BitEquality, IsNotVacuous) {
  Engine engine(Config());
  std::mt19937_64 random(400);
  auto tokens = RandomTokens(random, 60);
  const auto before = ColdLogits(engine, tokens);
  tokens[0] = (tokens[0] + 1) % 96;
  const auto after = ColdLogits(engine, tokens);
  // Two layers of windows of 40 reach back 78 tokens.
  EXPECT_NE(std::memcmp(before.data() + 59 * 96, after.data() + 59 * 96, 96 * sizeof(float)), 0);
  if (std::string(GetParam().format) != "fp32") {
    EngineConfig exact = Config();
    exact.kv_cache_dtype = "fp32";
    Engine reference(exact);
    EXPECT_NE(ColdLogits(reference, tokens), after);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, BitEquality, testing::ValuesIn(kCases), [](const auto& tested) {
  std::string name = tested.param.format;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name + (tested.param.hybrid     ? "_hybrid"
                 : tested.param.windowed ? "_window"
                 : tested.param.latents  ? "_latents"
                                         : "");
});

}  // namespace
}  // namespace kvanta::engine
