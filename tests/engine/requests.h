// Runs requests through an Engine or Engine::Impl on the calling thread and collects their outputs.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/tiny_model.h"
#include "kvanta/engine.h"

namespace kvanta::engine {

struct Collected {
  std::vector<int32_t> tokens;
  std::vector<std::vector<TokenLogprob>> logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;
  std::vector<float> embedding;
  FinishReason finish = FinishReason::kNone;
  std::optional<int32_t> stop_token;
  int cached_tokens = 0;
  int preemptions = 0;
  std::optional<KvCacheRecord> kv_cache;
  std::string error;
  bool invalid_input = false;
};

inline void Collect(std::span<const RequestOutput> outputs, std::map<std::string, Collected>& results) {
  for (const RequestOutput& output : outputs) {
    Collected& result = results[output.id];
    result.tokens.insert(result.tokens.end(), output.tokens.begin(), output.tokens.end());
    result.logprobs.insert(result.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
    if (!output.prompt_logprobs.empty()) result.prompt_logprobs = output.prompt_logprobs;
    if (!output.embedding.empty()) result.embedding = output.embedding;
    result.finish = output.finish;
    result.stop_token = output.stop_token;
    result.cached_tokens = output.cached_tokens;
    result.preemptions = output.preemptions;
    if (output.kv_cache) result.kv_cache = output.kv_cache;
    result.error = output.error;
    result.invalid_input = output.invalid_input;
  }
}

template <class AnyEngine>
std::map<std::string, Collected> RunAll(AnyEngine& engine) {
  std::map<std::string, Collected> results;
  std::vector<RequestOutput> outputs;
  while (engine.Step(outputs)) Collect(outputs, results);
  return results;
}

template <class AnyEngine>
Collected RunOne(AnyEngine& engine, Request request) {
  const std::string id = request.id;
  engine.Add(std::move(request));
  return RunAll(engine)[id];
}

template <class AnyEngine>
std::vector<float> ColdLogits(AnyEngine& engine, std::span<const int32_t> tokens, int chunk = 0) {
  std::vector<float> logits(tokens.size() * static_cast<size_t>(engine.Info().vocab));
  engine.Logits(tokens, chunk, logits, false);
  return logits;
}

inline EngineConfig TinyConfig(const TinyModel& model, const std::string& kv_cache_dtype) {
  EngineConfig config;
  config.model = model.Path();
  config.kv_cache_dtype = kv_cache_dtype;
  config.page_size = 16;
  config.max_num_batched_tokens = 64;
  config.max_num_seqs = 8;
  config.max_model_len = 128;
  config.kv_cache_memory_bytes = 4 << 20;
  config.threads = 1;
  config.poison_unused = true;
  return config;
}

inline SamplingParams Greedy(int max_tokens) {
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = max_tokens;
  params.ignore_eos = true;
  return params;
}

}  // namespace kvanta::engine
