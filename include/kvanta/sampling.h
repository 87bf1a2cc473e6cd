// Sampling parameters of a request. Defaults are those of vLLM's SamplingParams.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "kvanta/kv_scheme.h"

namespace kvanta {

struct SamplingParams {
  int max_tokens = 16;
  int min_tokens = 0;                   // stop tokens are masked before
  float temperature = 1.0F;             // 0: greedy
  int top_k = 0;                        // 0 or -1: all
  float top_p = 1.0F;                   // (0, 1]
  float min_p = 0.0F;                   // [0, 1]: relative to the most likely token's probability
  float repetition_penalty = 1.0F;      // > 0; over prompt and output
  float presence_penalty = 0.0F;        // over the output
  float frequency_penalty = 0.0F;       // over the output
  std::optional<uint64_t> seed;         // same seed, same prompt: same tokens, in any batch
  std::vector<int32_t> stop_token_ids;  // besides the model's end-of-sequence ids
  bool ignore_eos = false;
  std::vector<std::pair<int32_t, float>> logit_bias;
  int logprobs = -1;                       // -1: none; n >= 0: the sampled token's and the n most likely
  int prompt_logprobs = -1;                // the same for every prompt token but the first
  std::vector<int32_t> logprob_token_ids;  // also returned for every new token, after the most likely ones
  bool skip_reading_prefix_cache = false;  // the whole prompt is computed; its pages are cached as always
  double cache_ttl =
      0;  // seconds for which prompt and output stay cached, at most EngineConfig::max_cache_ttl; 0: none
  // Events to replay (RequestOutput::kv_cache): pages are demoted as these say, and not otherwise. None: by pressure.
  std::optional<std::vector<KvCacheEvent>> kv_cache_events;

  // Throws InputError naming the field, its value and the range.
  void Validate(int vocab_size) const;

  // Calls visit(name, pointer to member) for every field. Bindings derive from this list.
  template <class Visitor>
  static void VisitFields(Visitor&& visit) {
    visit("max_tokens", &SamplingParams::max_tokens);
    visit("min_tokens", &SamplingParams::min_tokens);
    visit("temperature", &SamplingParams::temperature);
    visit("top_k", &SamplingParams::top_k);
    visit("top_p", &SamplingParams::top_p);
    visit("min_p", &SamplingParams::min_p);
    visit("repetition_penalty", &SamplingParams::repetition_penalty);
    visit("presence_penalty", &SamplingParams::presence_penalty);
    visit("frequency_penalty", &SamplingParams::frequency_penalty);
    visit("seed", &SamplingParams::seed);
    visit("stop_token_ids", &SamplingParams::stop_token_ids);
    visit("ignore_eos", &SamplingParams::ignore_eos);
    visit("logit_bias", &SamplingParams::logit_bias);
    visit("logprobs", &SamplingParams::logprobs);
    visit("prompt_logprobs", &SamplingParams::prompt_logprobs);
    visit("logprob_token_ids", &SamplingParams::logprob_token_ids);
    visit("skip_reading_prefix_cache", &SamplingParams::skip_reading_prefix_cache);
    visit("cache_ttl", &SamplingParams::cache_ttl);
    visit("kv_cache_events", &SamplingParams::kv_cache_events);
  }
};

// Log-probability of a token in the model's own distribution: before temperature, penalties and masks.
struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
  int rank = 0;  // 1: most likely; equal logits rank by token id
};

}  // namespace kvanta
