// Samples a token from a row of logits. Order of operations, as in vLLM: the constraint's mask, min_tokens mask and
// logit_bias, repetition, frequency and presence penalties, (greedy:) argmax, temperature, min_p, top_k, top_p, sample.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kernels/linear/linear.h"
#include "kernels/sampling/sample_params.h"
#include "kvanta/sampling.h"
#include "runner/candidates.h"

namespace kvanta::runner {

// Sampling state of a request: parameters, seed and how often each token occurred.
class SamplerState {
 public:
  // stop_tokens: masked until min_tokens have been produced. seed: the request's own or one derived for it.
  SamplerState(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt,
               std::vector<int32_t> stop_tokens);

  const SamplingParams& Params() const noexcept { return params_; }
  uint64_t Seed() const noexcept { return seed_; }
  // Parameters with which kernels::Ops::Sample samples the next token; none if it depends on more than the logits: a
  // bias, a penalty, or stop tokens to mask. The caller checks for a constraint. drafts: number of draft tokens before
  // it.
  std::optional<kernels::SampleParams> NextSample(int vocab, int64_t drafts = 0) const;
  // Counts a sampled token.
  void Append(int32_t token);

 private:
  friend class Sampler;
  struct Occurrence {
    int output = 0;
  };
  bool counts_;  // there is a penalty
  SamplingParams params_;
  uint64_t seed_;
  std::vector<int32_t> stop_tokens_;
  std::unordered_map<int32_t, Occurrence> seen_;  // prompt and output
  int64_t produced_ = 0;
};

// Sampler with its scratch memory; one per worker. The same logits and state give the same token on any thread.
class Sampler {
 public:
  static constexpr int32_t kInvalidLogits = -1;
  static constexpr int32_t kNothingAllowed = -2;

  // The token after those of `state` and `drafts`, as if they had been appended to it.
  // logits: f32 [vocab], overwritten. Returns kInvalidLogits if one is NaN or +infinity, or none is finite.
  // mask: empty, or bit t % 32 of word t / 32 allows token t; returns kNothingAllowed if it allows none. Where it
  // allows stop tokens only, min_tokens does not mask them. argmax: of the logits; ignored if it is not finite.
  int32_t Sample(std::span<float> logits, const SamplerState& state, std::span<const uint32_t> mask = {},
                 kernels::RowArgmax argmax = {}, std::span<const int32_t> drafts = {});

 private:
  int32_t Choose(std::span<const float> logits, const SamplerState& state, int64_t produced, kernels::RowArgmax argmax);
  int32_t SampleToken(std::span<const float> logits, float max, const SamplingParams& params, double uniform);
  std::vector<Candidate> candidates_;
};

}  // namespace kvanta::runner
