// Log-probabilities of the model's own distribution: before temperature, penalties and masks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvanta::runner {

struct Logprob {
  int32_t token = 0;
  float logprob = 0;
  int rank = 0;  // 1: most likely; equal logits rank by token id
};

// `chosen` first, then the `count` most likely (which may contain it again). Empty when the logits are not valid
// (softmax.h). logits: f32 [vocab].
std::vector<Logprob> ComputeLogprobs(std::span<const float> logits, int32_t chosen, int count);

}  // namespace kvanta::runner
