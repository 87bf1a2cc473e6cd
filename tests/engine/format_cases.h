// Formats, models and random requests that bit equality is tested over.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/requests.h"
#include "formats/format.h"

namespace kvanta::engine {

struct FormatCase {
  const char* format;
  bool windowed;
  bool latents = false;
  bool hybrid = false;  // windows in some layers alone: two KV cache groups
};

inline const TinyModel& ModelOf(const FormatCase& what) {
  static const TinyModel sliding({.sliding_window = 40});
  static const TinyModel hybrid({.layers = 3, .sliding_window = 24, .full_layers = 1});
  if (what.hybrid) return hybrid;
  return what.latents ? LatentModel() : what.windowed ? sliding : Model();
}

// Every format, mixed sides, mixed layers (exact pages in one layer only), and sliding windows. Sanitizers look for
// faults of memory and threads, which formats share.
#ifdef KVANTA_SANITIZED
inline const FormatCase kCases[] = {
    {"bf16", true},           {"k=int8,v=int4", false},    {"int5_g32+exact=2+sink=2", true},
    {"kivi4+exact=2", false}, {"int4", true, false, true}, {"mla_fp8", false, true}};
#else
inline const FormatCase kCases[] = {{"fp32", false},
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

inline EngineConfig ConfigOf(const FormatCase& what) {
  EngineConfig config = TinyConfig(ModelOf(what), what.format);
  // Tiles of 32 tokens do not fit pages of 16.
  const formats::Format& keys = formats::Find(KvScheme::Parse(config.kv_cache_dtype).k.format);
  config.page_size = std::max(config.page_size, keys.scaling.token_group);
  return config;
}

// Room for one sequence of full length, and for the beginnings of a few.
inline int64_t ScarceMemory(const CachePlan& plan) {
  return 10 * plan.page_bytes + 5 * plan.exact_pages_per_sequence * plan.exact_page_bytes;
}

// One of many schedules, most of which follow the clock: no result may depend on it.
inline void ScheduleBy(int number, EngineConfig& config) {
  constexpr double kStepMs[] = {0, 0.05, 0.3, 1, 10};
  config.max_step_ms = kStepMs[number % 5];
  config.scheduling_policy = number % 7 == 3 ? "fcfs" : "shortest";
  config.max_prompt_delay = number % 3 == 0 ? 0.005 : 0;
  config.fair_by = number % 2 == 0 ? "user" : "none";
  config.max_num_partial_prefills = number % 4;
  config.long_prefill_token_threshold = number % 3 == 1 ? 20 : 0;
  config.max_long_partial_prefills = number % 6 == 4 ? 1 : 0;
}

inline std::string NameOf(const ::testing::TestParamInfo<FormatCase>& tested) {
  std::string name = tested.param.format;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name + (tested.param.hybrid     ? "_hybrid"
                 : tested.param.windowed ? "_window"
                 : tested.param.latents  ? "_latents"
                                         : "");
}

inline bool Same(const std::vector<std::vector<TokenLogprob>>& a, const std::vector<std::vector<TokenLogprob>>& b) {
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

// All that a request gave out, to the bit.
inline void ExpectEqual(const Collected& got, const Collected& want, const std::string& id) {
  EXPECT_EQ(got.error, "") << id;
  EXPECT_EQ(got.tokens, want.tokens) << id;
  EXPECT_EQ(got.finish, want.finish) << id;
  EXPECT_EQ(got.stop_token, want.stop_token) << id;
  EXPECT_EQ(got.embedding, want.embedding) << id;
  EXPECT_TRUE(Same(got.logprobs, want.logprobs)) << id;
  EXPECT_TRUE(Same(got.prompt_logprobs, want.prompt_logprobs)) << id;
}

// Half of the requests begin with one of the stems, up to some token of it.
inline Request RandomRequest(std::mt19937_64& random, const std::vector<std::vector<int32_t>>& stems, int number) {
  Request request;
  request.id = std::to_string(number);
  if (random() % 2 == 0) {
    request.prompt = stems[random() % stems.size()];
    request.prompt.resize(random() % request.prompt.size());
  }
  const auto tail = RandomTokens(random, static_cast<int64_t>(random() % 30 + 1));
  request.prompt.insert(request.prompt.end(), tail.begin(), tail.end());
  request.priority = static_cast<int>(random() % 2);
  request.user = std::to_string(number % 3);
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

}  // namespace kvanta::engine
