// Log-probabilities of the model's own distribution: before temperature, penalties and masks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvanta/sampling.h"

namespace kvanta::runner {

// That of `token` first, then those of the `count` most likely tokens and of `tokens`, either of which may include it
// again. Empty when the logits are invalid (softmax.h). logits: f32 [vocab].
std::vector<TokenLogprob> ComputeLogprobs(std::span<const float> logits, int32_t token, int count,
                                          std::span<const int32_t> tokens = {});

}  // namespace kvanta::runner
