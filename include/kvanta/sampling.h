// How tokens are chosen from logits. Defaults are those of vLLM's SamplingParams.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace kvanta {

struct SamplingParams {
  int max_tokens = 16;
  int min_tokens = 0;                   // no stop token is taken before
  float temperature = 1.0F;             // 0: greedy
  int top_k = 0;                        // 0 or -1: all
  float top_p = 1.0F;                   // (0, 1]
  float min_p = 0.0F;                   // [0, 1]: of the most likely token's probability
  float repetition_penalty = 1.0F;      // > 0; over prompt and output
  float presence_penalty = 0.0F;        // over the output
  float frequency_penalty = 0.0F;       // over the output
  std::optional<uint64_t> seed;         // same seed, same prompt: same tokens, in any batch
  std::vector<int32_t> stop_token_ids;  // besides the model's end-of-sequence ids
  bool ignore_eos = false;
  std::vector<std::pair<int32_t, float>> logit_bias;
  int logprobs = -1;         // -1: none; n >= 0: the chosen token's and the n most likely
  int prompt_logprobs = -1;  // the same for every prompt token but the first

  // Throws InputError naming the field, its value and the range.
  void Validate(int vocab_size) const;
};

}  // namespace kvanta
