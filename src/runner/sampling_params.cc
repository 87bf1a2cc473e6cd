#include <fmt/format.h>

#include <cmath>

#include "kvanta/error.h"
#include "kvanta/sampling.h"

namespace kvanta {
namespace {

template <class T>
void Require(bool ok, const char* field, T value, const char* range) {
  if (!ok) throw InputError(fmt::format("sampling parameter {} = {}: must be {}", field, value, range), field);
}

}  // namespace

void SamplingParams::Validate(int vocab_size) const {
  Require(max_tokens >= 1, "max_tokens", max_tokens, "at least 1");
  Require(min_tokens >= 0 && min_tokens <= max_tokens, "min_tokens", min_tokens, "between 0 and max_tokens");
  Require(std::isfinite(temperature) && temperature >= 0, "temperature", temperature, "finite and at least 0");
  Require(top_k >= -1, "top_k", top_k, "-1 or 0 (all) or at least 1");
  Require(top_p > 0 && top_p <= 1, "top_p", top_p, "above 0 and at most 1");
  Require(min_p >= 0 && min_p <= 1, "min_p", min_p, "between 0 and 1");
  Require(std::isfinite(repetition_penalty) && repetition_penalty > 0, "repetition_penalty", repetition_penalty,
          "finite and above 0");
  Require(std::abs(presence_penalty) <= 2, "presence_penalty", presence_penalty, "between -2 and 2");
  Require(std::abs(frequency_penalty) <= 2, "frequency_penalty", frequency_penalty, "between -2 and 2");
  Require(logprobs >= -1 && logprobs <= vocab_size, "logprobs", logprobs, "-1 (none) or between 0 and the vocabulary");
  Require(prompt_logprobs >= -1 && prompt_logprobs <= vocab_size, "prompt_logprobs", prompt_logprobs,
          "-1 (none) or between 0 and the vocabulary");
  Require(logprob_token_ids.empty() || logprobs >= 0, "logprobs", logprobs, "at least 0 with logprob_token_ids");
  Require(std::isfinite(cache_ttl) && cache_ttl >= 0, "cache_ttl", cache_ttl, "finite and at least 0 seconds (none)");
  const auto token_ok = [&](int32_t token) { return token >= 0 && token < vocab_size; };
  for (const int32_t token : stop_token_ids)
    Require(token_ok(token), "stop_token_ids", token, "token ids of the model");
  for (const int32_t token : logprob_token_ids)
    Require(token_ok(token), "logprob_token_ids", token, "token ids of the model");
  for (const auto& [token, bias] : logit_bias) {
    Require(token_ok(token), "logit_bias", token, "token ids of the model");
    Require(std::isfinite(bias), "logit_bias", bias, "finite");
  }
}

}  // namespace kvanta
