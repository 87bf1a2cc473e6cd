#include "runner/sampler.h"

#include <algorithm>
#include <cmath>

#include "kernels/sampling/sorted_candidates.h"
#include "runner/philox.h"
#include "runner/softmax.h"
#include "runner/token_mask.h"

namespace kvanta::runner {
namespace {

bool Penalizes(const SamplingParams& params) {
  return params.repetition_penalty != 1.0F || params.presence_penalty != 0.0F || params.frequency_penalty != 0.0F;
}

// Below it, sampling is greedy, as in vLLM: division by the temperature could overflow.
constexpr float kMinTemperature = 1e-5F;

// Samples from the whole vocabulary, in the order of ids.
int32_t DrawUnsorted(std::span<const float> logits, float max, float scale, float min_logit, double uniform) {
  const double target = uniform * SumExp(logits, max, scale, min_logit);
  double sum = 0;
  int32_t last = 0;
  for (int32_t token = 0; token < std::ssize(logits); ++token) {
    const float x = logits[static_cast<size_t>(token)];
    if (!(x >= min_logit)) continue;
    const float term = ExpOfNegative((x - max) * scale);
    if (term == 0.0F) continue;
    sum += static_cast<double>(term);
    last = token;  // the result if rounding leaves the sum below the target
    if (sum > target) break;
  }
  return last;
}

}  // namespace

SamplerState::SamplerState(const SamplingParams& params, uint64_t seed, std::span<const int32_t> prompt,
                           std::vector<int32_t> stop_tokens)
    : counts_(Penalizes(params)), params_(params), seed_(seed), stop_tokens_(std::move(stop_tokens)) {
  if (!counts_) return;
  for (const int32_t token : prompt) seen_.try_emplace(token);
}

void SamplerState::Append(int32_t token) {
  ++produced_;
  if (counts_) ++seen_[token].output;
}

std::optional<kernels::SampleParams> SamplerState::NextSample(int vocab, int64_t drafts) const {
  const int64_t produced = produced_ + drafts;
  const bool top_k = params_.top_k > 0 && params_.top_k < vocab;
  const bool greedy = params_.temperature < kMinTemperature;
  if (produced < params_.min_tokens || !params_.logit_bias.empty() || counts_) return {};
  if (greedy) return kernels::SampleParams{};
  if (top_k && params_.top_k > kernels::kMaxCandidates) return {};
  kernels::SampleParams sample{.uniform = UniformSample(seed_, static_cast<uint64_t>(produced)),
                               .scale = 1.0F / params_.temperature,
                               .top_k = top_k ? params_.top_k : 0,
                               .top_p = params_.top_p};
  if (params_.min_p > 0) sample.min_logit_offset = std::log(params_.min_p) * params_.temperature;
  return sample;
}

int32_t Sampler::Sample(std::span<float> logits, const SamplerState& state, std::span<const uint32_t> mask,
                        kernels::RowArgmax argmax, std::span<const int32_t> drafts) {
  const SamplingParams& params = state.params_;
  const int64_t produced = state.produced_ + std::ssize(drafts);
  // Checked before masking, which could hide a NaN.
  if (!argmax.finite && !FindRange(logits).valid) return kInvalidLogits;
  const auto at = [&](int32_t token) -> float& { return logits[static_cast<size_t>(token)]; };
  bool may_stop = produced >= params.min_tokens;
  if (mask.empty() && may_stop && params.logit_bias.empty() && !state.counts_)
    return Choose(logits, state, produced, argmax);
  if (!mask.empty()) {
    const int64_t allowed = ApplyMask(mask, logits);
    if (allowed == 0) return kNothingAllowed;
    const auto is_allowed = [&](int32_t token) { return Allows(mask, token); };
    may_stop = may_stop || allowed == std::ranges::count_if(state.stop_tokens_, is_allowed);
  }
  if (!may_stop) {
    for (const int32_t token : state.stop_tokens_) at(token) = -INFINITY;
  }
  for (const auto& [token, bias] : params.logit_bias) at(token) += bias;
  const auto penalize = [&](int32_t token, int64_t output) {
    float& x = at(token);
    x = x > 0 ? x / params.repetition_penalty : x * params.repetition_penalty;
    if (output > 0) x -= params.frequency_penalty * static_cast<float>(output) + params.presence_penalty;
  };
  for (const auto& [token, occurrence] : state.seen_) {
    penalize(token, occurrence.output + std::ranges::count(drafts, token));
  }
  if (state.counts_) {
    for (size_t i = 0; i < drafts.size(); ++i) {
      const bool is_first = std::ranges::find(drafts.first(i), drafts[i]) == drafts.first(i).end();
      if (is_first && !state.seen_.contains(drafts[i])) penalize(drafts[i], std::ranges::count(drafts, drafts[i]));
    }
  }
  return Choose(logits, state, produced, {});
}

// Samples from final logits.
int32_t Sampler::Choose(std::span<const float> logits, const SamplerState& state, int64_t produced,
                        kernels::RowArgmax argmax) {
  const bool greedy = state.params_.temperature < kMinTemperature;
  if (!argmax.finite) {
    const LogitRange range = FindRange(logits);
    if (!range.valid) return kInvalidLogits;
    argmax.value = range.max;
    if (greedy)
      argmax.column = static_cast<int32_t>(std::find(logits.begin(), logits.end(), range.max) - logits.begin());
  }
  if (greedy) return argmax.column;
  return SampleToken(logits, argmax.value, state.params_, UniformSample(state.seed_, static_cast<uint64_t>(produced)));
}

// The sampled token of final logits with this maximum, at a temperature above 0.
int32_t Sampler::SampleToken(std::span<const float> logits, float max, const SamplingParams& params, double uniform) {
  const float scale = 1.0F / params.temperature;
  const auto vocab = static_cast<int>(logits.size());
  const auto prob = [&](int32_t i) { return ExpOfNegative((candidates_[static_cast<size_t>(i)].logit - max) * scale); };
  float min_logit = -INFINITY;
  if (params.min_p > 0) min_logit = max + std::log(params.min_p) * params.temperature;

  double mass = kernels::kAnyMass;
  if (params.top_k > 0 && params.top_k < vocab) {
    SelectTop(logits, params.top_k, min_logit, candidates_);
    const auto count = static_cast<int32_t>(candidates_.size());
    if (params.top_p < 1.0F) {
      mass = static_cast<double>(params.top_p) * kernels::HeadOfMass(prob, count, kernels::kAnyMass).mass;
    }
  } else if (params.top_p < 1.0F) {
    // Only the head is sorted: candidates above the highest threshold that leaves enough mass.
    mass = static_cast<double>(params.top_p) * SumExp(logits, max, scale, min_logit);
    float threshold = min_logit;
    for (const float offset : {3.0F, 7.0F, 12.0F}) {
      const float trial = max - offset * params.temperature;
      if (trial <= min_logit) break;
      if (SumExp(logits, max, scale, trial) >= mass) {
        threshold = trial;
        break;
      }
    }
    SelectAbove(logits, threshold, candidates_);
  } else {
    return DrawUnsorted(logits, max, scale, min_logit, uniform);
  }
  const auto count = static_cast<int32_t>(candidates_.size());
  const int32_t index = kernels::PickCandidate(prob, kernels::HeadOfMass(prob, count, mass), uniform);
  return candidates_[static_cast<size_t>(index)].token;
}

}  // namespace kvanta::runner
