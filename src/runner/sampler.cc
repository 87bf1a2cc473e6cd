#include "runner/sampler.h"

#include <algorithm>
#include <cmath>

#include "runner/philox.h"
#include "runner/softmax.h"
#include "runner/token_mask.h"

namespace kvanta::runner {
namespace {

bool Penalizes(const SamplingParams& params) {
  return params.repetition_penalty != 1.0F || params.presence_penalty != 0.0F || params.frequency_penalty != 0.0F;
}

// Below it, division by the temperature would overflow: greedy, as in vLLM.
constexpr float kMinTemperature = 1e-5F;

// Inverse of the cumulative distribution over candidates; the last one catches rounding.
int32_t Pick(std::span<const Candidate> candidates, float max, float scale, double target) {
  double sum = 0;
  for (const Candidate& candidate : candidates) {
    sum += static_cast<double>(ExpOfNegative((candidate.logit - max) * scale));
    if (sum > target) return candidate.token;
  }
  return candidates.back().token;
}

double Mass(std::span<const Candidate> candidates, float max, float scale) {
  double sum = 0;
  for (const Candidate& candidate : candidates) {
    sum += static_cast<double>(ExpOfNegative((candidate.logit - max) * scale));
  }
  return sum;
}

// Shortest head whose mass reaches `wanted`, at least one.
size_t HeadOfMass(std::span<const Candidate> candidates, float max, float scale, double requested) {
  double sum = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    sum += static_cast<double>(ExpOfNegative((candidates[i].logit - max) * scale));
    if (sum >= requested) return i + 1;
  }
  return candidates.size();
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

std::optional<kernels::SampleParams> SamplerState::NextSample(int vocab) const {
  const bool some = params_.top_k > 0 && params_.top_k < vocab;
  const bool greedy = params_.temperature < kMinTemperature;
  if (produced_ < params_.min_tokens || !params_.logit_bias.empty() || counts_) return {};
  if (greedy) return kernels::SampleParams{};
  if (some && params_.top_k > kernels::kMaxCandidates) return {};
  kernels::SampleParams draw{.uniform = UniformSample(seed_, static_cast<uint64_t>(produced_)),
                             .scale = 1.0F / params_.temperature,
                             .top_k = some ? params_.top_k : 0,
                             .top_p = params_.top_p};
  if (params_.min_p > 0) draw.min_logit_offset = std::log(params_.min_p) * params_.temperature;
  return draw;
}

int32_t Sampler::Sample(std::span<float> logits, const SamplerState& state, std::span<const uint32_t> mask,
                        kernels::RowArgmax max_value) {
  const SamplingParams& params = state.params_;
  // Before any mask: a NaN must not hide behind one.
  if (!max_value.finite && !FindRange(logits).valid) return kInvalidLogits;
  const auto at = [&](int32_t token) -> float& { return logits[static_cast<size_t>(token)]; };
  bool may_stop = state.produced_ >= params.min_tokens;
  if (mask.empty() && may_stop && params.logit_bias.empty() && state.seen_.empty())
    return Choose(logits, state, max_value);
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
  for (const auto& [token, occurrence] : state.seen_) {
    float& x = at(token);
    x = x > 0 ? x / params.repetition_penalty : x * params.repetition_penalty;
    if (occurrence.output > 0) {
      x -= params.frequency_penalty * static_cast<float>(occurrence.output) + params.presence_penalty;
    }
  }
  return Choose(logits, state, {});
}

// The logits are final.
int32_t Sampler::Choose(std::span<const float> logits, const SamplerState& state, kernels::RowArgmax max_value) {
  const bool greedy = state.params_.temperature < kMinTemperature;
  if (!max_value.finite) {
    const LogitRange range = FindRange(logits);
    if (!range.valid) return kInvalidLogits;
    max_value.value = range.max;
    if (greedy)
      max_value.column = static_cast<int32_t>(std::find(logits.begin(), logits.end(), range.max) - logits.begin());
  }
  if (greedy) return max_value.column;
  return Draw(logits, max_value.value, state.params_,
              UniformSample(state.seed_, static_cast<uint64_t>(state.produced_)));
}

int32_t Sampler::Draw(std::span<const float> logits, float max, const SamplingParams& params, double uniform) {
  const float scale = 1.0F / params.temperature;
  const auto vocab = static_cast<int>(logits.size());
  const bool some = params.top_k > 0 && params.top_k < vocab;
  float threshold = -INFINITY;
  if (params.min_p > 0) threshold = max + std::log(params.min_p) * params.temperature;

  if (some) {
    SelectTop(logits, params.top_k, threshold, candidates_);
  } else if (params.top_p < 1.0F) {
    // Only the head matters: lower the bar until what lies above it has the wanted mass.
    const double requested = static_cast<double>(params.top_p) * SumExp(logits, max, scale, threshold);
    float threshold_ = threshold;
    for (const float min_logit_offset : {3.0F, 7.0F, 12.0F}) {
      const float trial = max - min_logit_offset * params.temperature;
      if (trial <= threshold) break;
      if (SumExp(logits, max, scale, trial) >= requested) {
        threshold_ = trial;
        break;
      }
    }
    SelectAbove(logits, threshold_, candidates_);
    const size_t kept = HeadOfMass(candidates_, max, scale, requested);
    const auto head = std::span(candidates_).first(kept);
    return Pick(head, max, scale, uniform * Mass(head, max, scale));
  } else {
    // In order of ids: nothing to select.
    const double target = uniform * SumExp(logits, max, scale, threshold);
    double sum = 0;
    int32_t last = 0;
    for (int32_t token = 0; token < vocab; ++token) {
      const float x = logits[static_cast<size_t>(token)];
      if (!(x >= threshold)) continue;
      const float term = ExpOfNegative((x - max) * scale);
      if (term == 0.0F) continue;
      sum += static_cast<double>(term);
      last = token;  // catches rounding at the end
      if (sum > target) break;
    }
    return last;
  }
  size_t kept = candidates_.size();
  if (params.top_p < 1.0F) {
    kept = HeadOfMass(candidates_, max, scale, static_cast<double>(params.top_p) * Mass(candidates_, max, scale));
  }
  const auto head = std::span(candidates_).first(kept);
  return Pick(head, max, scale, uniform * Mass(head, max, scale));
}

}  // namespace kvanta::runner
