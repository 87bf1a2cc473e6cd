// A row of a step's logits, from what is asked of it to the sampled token or the log-probabilities.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runner/sampler.h"

namespace kvanta::runner {

struct SampleRow {
  size_t item = 0;                      // index of its sequence in the batch
  const SamplerState* state = nullptr;  // null: only the log-probabilities of `token`, at prompt_position
  int64_t prompt_position = -1;
  std::span<const int32_t> drafts = {};  // draft tokens between those of `state` and the one to sample
  std::span<const uint32_t> mask = {};   // as Sampler::Sample takes it
  int logprobs = -1;  // most likely tokens whose log-probabilities are returned, too; -1: none at all
  std::span<const int32_t> logprob_token_ids = {};  // with logprobs >= 0: tokens that are returned, too
  // To sample where the logits are, without a copy of them on the host (Runner::SamplesOnDevice).
  std::optional<kernels::SampleParams> device_params = {};
  int32_t token = -1;  // in, without a state; out, with one (negative: a constant of Sampler)

  // Set by Runner::Logits.
  std::span<float> logits = {};           // f32 [vocab], overwritten by sampling; undefined where sampled_on_device
  kernels::RowArgmax argmax = {};         // maximum of the logits
  bool sampled_on_device = false;         // `token` is set
  std::vector<TokenLogprob> result = {};  // set by RowSampler; empty where the logits are invalid
};

}  // namespace kvanta::runner
