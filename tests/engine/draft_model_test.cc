// Draft models: the bits of plain decoding whatever they propose, and every draft accepted where they are the target.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "engine/engine_impl.h"
#include "engine/format_cases.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

EngineConfig WithDraftModel(EngineConfig config, const TinyModel& draft, const std::string& kv_cache_dtype,
                            int tokens = 4) {
  config.speculative_config = fmt::format(R"({{"model": "{}", "num_speculative_tokens": {}, "kv_cache_dtype": "{}"}})",
                                          draft.Path(), tokens, kv_cache_dtype);
  return config;
}

// An engine whose draft model costs so much of the target's time. At 0 it pauses only where drafts fail.
std::unique_ptr<Engine::Impl> EngineAtCost(const EngineConfig& config, float draft_cost = 0) {
  EngineComponents components = LoadComponents(config);
  components.draft_cost = draft_cost;
  return std::make_unique<Engine::Impl>(std::move(components));
}

Request RequestOf(int number, int64_t prompt, int max_tokens, float temperature = 0) {
  std::mt19937_64 random(static_cast<uint64_t>(number));
  Request request{.id = fmt::format("{}", number), .prompt = RandomTokens(random, prompt)};
  request.sampling = Greedy(max_tokens);
  request.sampling.temperature = temperature;
  return request;
}

class DraftModelOver : public testing::TestWithParam<FormatCase> {};

// Random requests in caches too small for them. The draft model is the target on another cache: mostly right.
TEST_P(DraftModelOver, KeepsEveryBit) {
  EngineConfig config = ConfigOf(GetParam());
  config.enable_prefix_caching = false;
  config.max_num_seqs = 1;
  Engine plain(config);
  config = WithDraftModel(ConfigOf(GetParam()), ModelOf(GetParam()), GetParam().latents ? "mla_int4" : "int4");
  config.threads = 2;
  EngineConfig of_draft = config;
  of_draft.kv_cache_dtype = "int4";
  config.kv_cache_memory_bytes = ScarceMemory(PlanCacheBytes(config)) + ScarceMemory(PlanCacheBytes(of_draft));
  const auto engine = EngineAtCost(config);
  std::mt19937_64 random(700);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * config.page_size));
  std::map<std::string, Collected> want, got;
  std::vector<Request> requests;
  for (int i = 0; i < 60; ++i) {
    requests.push_back(RandomRequest(random, stems, i));
    want[requests.back().id] = RunOne(plain, requests.back());
  }
  std::vector<RequestOutput> outputs;
  size_t added = 0;
  while (true) {
    while (added < requests.size() && random() % 3 != 0) engine->Add(requests[added++]);
    if (!engine->Step(outputs) && added == requests.size()) break;
    Collect(outputs, got);
  }
  for (const Request& request : requests) ExpectEqual(got[request.id], want[request.id], request.id);
  const EngineStats stats = engine->Stats();
  EXPECT_GT(stats.accepted_tokens, 50);
  EXPECT_LT(stats.accepted_tokens, stats.draft_tokens);
  EXPECT_TRUE(stats.preemptions > 0 || GetParam().hybrid) << "windows leave more room";
  EXPECT_GT(stats.cached_tokens, 0);
  EXPECT_GT(stats.draft_cache_used_bytes, 0);
  engine->ResetPrefixCache();
  EXPECT_EQ(engine->Stats().cache_used_bytes, 0) << "references leaked";
  EXPECT_EQ(engine->Stats().draft_cache_used_bytes, 0) << "references leaked";
}

constexpr FormatCase kDraftCases[] = {
    {"bf16", false}, {"kivi4+exact=2", true}, {"int8", true, false, true}, {"bf16", false, true}};
INSTANTIATE_TEST_SUITE_P(Formats, DraftModelOver, testing::ValuesIn(kDraftCases), NameOf);

// Greedy and sampled: drafts are sampled with the random numbers that verification takes. A token that the draft model
// computed at a wrong position, or after a rejected one, would be rejected.
TEST(DraftModel, TheTargetItselfIsAlwaysRight) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_model_len = 256;
  Engine plain(config);
  const auto engine = EngineAtCost(WithDraftModel(config, Model(), "int8", 5));
  int number = 0;
  for (const float temperature : {0.0F, 1.0F}) {
    for (const int64_t prompt : {3, 16, 70, 150, 150}) {
      Request request = RequestOf(prompt == 150 ? 1000 : number, prompt, 60, temperature);
      request.sampling.seed = number++;
      if (temperature > 0) request.sampling.frequency_penalty = 0.5F;
      ExpectEqual(RunOne(*engine, request), RunOne(plain, request), fmt::format("{} {}", prompt, temperature));
    }
  }
  const EngineStats stats = engine->Stats();
  EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
  EXPECT_GT(stats.accepted_tokens, 10 * 60 * 2 / 3);
}

TEST(DraftModel, SequencesShareItsPasses) {
  EngineConfig config = TinyConfig(Model(), "int4");
  Engine plain(config);
  const auto engine = EngineAtCost(WithDraftModel(config, Model(), "int4"));
  std::vector<Request> requests;
  for (int i = 0; i < 8; ++i) requests.push_back(RequestOf(i, 5 + 9 * i, 30 + i, i % 2 == 0 ? 0.0F : 0.8F));
  for (const Request& request : requests) engine->Add(request);
  const auto got = RunAll(*engine);
  for (const Request& request : requests) ExpectEqual(got.at(request.id), RunOne(plain, request), request.id);
  const EngineStats stats = engine->Stats();
  EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
  EXPECT_LT(stats.steps, 25) << "plain decoding takes more than 37";
}

TEST(DraftModel, BudgetIsSplitByTokens) {
  const EngineConfig config = TinyConfig(Model(), "bf16");
  const auto engine = EngineAtCost(WithDraftModel(config, Model(), "bf16"));
  const EngineStats stats = engine->Stats();
  EXPECT_EQ(stats.cache_budget_bytes + stats.draft_cache_budget_bytes, config.kv_cache_memory_bytes);
  EXPECT_EQ(stats.cache_budget_bytes, stats.draft_cache_budget_bytes) << "the same model and format";
  EXPECT_GT(stats.draft_weight_bytes, 0);
  EXPECT_EQ(engine->Config().kv_cache_memory_bytes, config.kv_cache_memory_bytes);
}

TEST(DraftModel, PausesWhereItCostsMoreThanItSaves) {
  EngineConfig config = TinyConfig(Model(), "int8");
  Engine plain(config);
  const Request request = RequestOf(1, 5, 110);
  const auto cheap = EngineAtCost(WithDraftModel(config, Model(), "int8"), 0.2F);
  const auto dear = EngineAtCost(WithDraftModel(config, Model(), "int8"), 1.0F);
  ExpectEqual(RunOne(*cheap, request), RunOne(plain, request), "cheap");
  ExpectEqual(RunOne(*dear, request), RunOne(plain, request), "dear");
  EXPECT_GT(cheap->Stats().accepted_tokens, 70);
  EXPECT_LE(dear->Stats().draft_tokens, 10) << "though every token is accepted";
  EXPECT_GT(dear->Stats().draft_tokens, 1) << "it tries again";
}

// The draft model proposes nothing past its own limit.
TEST(DraftModel, MayBeShorterThanTheModel) {
  const TinyModel draft({.max_position = 64});
  EngineConfig config = TinyConfig(Model(), "int8");
  Engine plain(config);
  const auto engine = EngineAtCost(WithDraftModel(config, draft, "int8"));
  const Request request = RequestOf(1, 40, 80);
  ExpectEqual(RunOne(*engine, request), RunOne(plain, request), "a");
  EXPECT_GT(engine->Stats().accepted_tokens, 10);
  EXPECT_LT(engine->Stats().accepted_tokens, 24);
}

std::string ErrorOfDraft(const EngineConfig& config) {
  try {
    LoadComponents(config);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(DraftModel, RefusesWithReason) {
  using testing::AnyOf, testing::HasSubstr;
  const EngineConfig config = TinyConfig(Model(), "int8");
  const TinyModel other({.vocab = 128});
  EXPECT_THAT(ErrorOfDraft(WithDraftModel(config, other, "int8")),
              HasSubstr("has a vocabulary of 128 tokens, the model"));
  EXPECT_THAT(ErrorOfDraft(WithDraftModel(config, Model(), "fp8_e4m3")), HasSubstr("needs scales"));
  EXPECT_THAT(ErrorOfDraft(WithDraftModel(config, Model(), "int9")), HasSubstr("int9"));
  EngineConfig ranks = WithDraftModel(config, Model(), "int8");
  ranks.tensor_parallel_size = 2;
  EXPECT_THAT(ErrorOfDraft(ranks),
              AnyOf(HasSubstr("tensor_parallel_size = 2 is not supported"), HasSubstr("has no Gloo")));
  EngineConfig missing = config;
  missing.speculative_config = R"({"model": "/no/such/folder"})";
  EXPECT_THAT(ErrorOfDraft(missing), HasSubstr("/no/such/folder"));
}

}  // namespace
}  // namespace kvanta::engine
