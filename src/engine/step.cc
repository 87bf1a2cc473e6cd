// One step: schedule, run, sample, postprocess.
#include <fmt/format.h>

#include <algorithm>

#include "engine/engine_impl.h"

namespace kvanta::engine {
namespace {

std::vector<TokenLogprob> Public(const std::vector<runner::Logprob>& logprobs) {
  std::vector<TokenLogprob> result;
  result.reserve(logprobs.size());
  for (const runner::Logprob& entry : logprobs) result.push_back({entry.token, entry.logprob, entry.rank});
  return result;
}

}  // namespace

bool Core::StepLocked(std::vector<RequestOutput>& outputs) {
  const double start = Now();
  outputs.clear();
  DrainInbox(outputs);
  ExpireRequests(start, outputs);
  const auto fail = [&](RequestState& request, std::string error) {
    Fail(request, FinishReason::kError, std::move(error), outputs);
  };
  try {
    const auto scheduled = scheduler_->Schedule();
    chunks_.assign(scheduled.begin(), scheduled.end());
    counters_.seconds_schedule += Now() - start;
  } catch (const std::exception& error) {  // out of memory: nobody knows whose
    std::vector<RequestState*> all;
    for (const auto& [id, request] : requests_) all.push_back(request.get());
    for (RequestState* request : all) fail(*request, error.what());
    return true;
  }
  for (scheduler::Sequence* sequence : scheduler_->Unschedulable()) {
    fail(*by_sequence_.at(sequence), fmt::format("{} tokens need more pages than the cache of {} bytes has",
                                                 sequence->tokens.size(), cache_->pool.BudgetBytes()));
  }
  if (chunks_.empty()) return !outputs.empty();
  try {
    RunChunks(chunks_, start);
    scheduler_->Commit();
    SampleRows();
    backend_->FetchCounts();
  } catch (const std::exception& error) {
    for (const scheduler::Chunk& chunk : chunks_) fail(*by_sequence_.at(chunk.sequence), error.what());
    sampled_.clear();
  }
  const double sampled_at = Now();
  for (Sampled& sampled : sampled_) Accept(sampled, sampled_at, outputs);
  for (const scheduler::Chunk& chunk : chunks_) {
    const auto request = by_sequence_.find(chunk.sequence);
    if (request != by_sequence_.end() && !request->second->failure.empty()) {
      fail(*request->second, std::string(request->second->failure));
    }
  }
  ++counters_.steps;
  counters_.seconds_total += Now() - start;
  return true;
}

void Core::RunChunks(std::span<const scheduler::Chunk> chunks, double now) {
  if (measure_scales_) MeasureScales(chunks.front().sequence->tokens);
  items_.clear();
  requested_.clear();
  masks_->Clear();
  int64_t row = 0;
  for (const scheduler::Chunk& chunk : chunks) {
    RequestState& request = *by_sequence_.at(chunk.sequence);
    const std::span<const int32_t> tokens(request.sequence.tokens);
    items_.push_back({.tokens = tokens.subspan(static_cast<size_t>(chunk.start), static_cast<size_t>(chunk.tokens)),
                      .start = chunk.start,
                      .pages = request.sequence.pages.Pages()});
    if (request.WantsPromptLogprobs() && request.Produced() == 0) {
      const int64_t end = std::min(chunk.start + chunk.tokens, request.PromptTokens() - 1);
      for (int64_t position = chunk.start; position < end; ++position) {
        requested_.push_back({&request, row + position - chunk.start, position + 1});
      }
    }
    row += chunk.tokens;
    if (chunk.last) requested_.push_back({&request, row - 1, -1, masks_->Want(request)});
    if (request.times.scheduled == 0) {
      request.times.scheduled = now;
      request.counted = chunk.start;  // the prefix cache had what lies before
    }
    // Not what is computed again after a preemption.
    const int64_t prompt_end = std::min(chunk.start + chunk.tokens, request.PromptTokens());
    counters_.prompt_tokens += std::max<int64_t>(0, prompt_end - request.counted);
    request.counted = std::max(request.counted, prompt_end);
  }
  const double start = Now();
  runner_->Forward(items_, *backend_);
  counters_.seconds_forward += Now() - start;
}

// What a token takes that is chosen where the logits are.
runner::SampleRow Core::UseOf(const LogitsRow& want) const {
  const runner::SamplerState& sampler = want.request->sampler;
  if (want.prompt_position >= 0 || want.mask >= 0 || sampler.Params().logprobs >= 0) return {};
  const std::optional<kernels::SampleParams> draw = sampler.NextSample(components_.info.vocab);
  return draw ? runner::SampleRow{.read = false, .draw = *draw} : runner::SampleRow{};
}

void Core::SampleRows() {
  sampled_.clear();
  const double asked = Now();
  masks_->Fill();
  counters_.seconds_masks += Now() - asked;
  const auto vocab = static_cast<size_t>(components_.info.vocab);
  const auto limit = static_cast<size_t>(runner_->MaxLogitRows());
  for (size_t first = 0; first < requested_.size(); first += limit) {
    const auto requested = std::span(requested_).subspan(first, std::min(limit, requested_.size() - first));
    rows_.clear();
    uses_.clear();
    for (const LogitsRow& want : requested) {
      rows_.push_back(want.row);
      if (runner_->Draws()) uses_.push_back(UseOf(want));
    }
    const double start = Now();
    const std::span<float> logits = runner_->Logits(rows_, uses_);
    const double done = Now();
    counters_.seconds_forward += done - start;
    tasks_.resize(requested.size());
    for (size_t i = 0; i < requested.size(); ++i) {
      const RequestState& request = *requested[i].request;
      const SamplingParams& params = request.sampler.Params();
      tasks_[i].logits = logits.subspan(i * vocab, vocab);
      tasks_[i].max_value = runner_->Argmaxes()[i];
      tasks_[i].result.clear();
      tasks_[i].chosen = !uses_.empty() && !uses_[i].read && runner_->SampledTokens()[i] >= 0;
      if (tasks_[i].chosen) {
        tasks_[i].token = runner_->SampledTokens()[i];
        continue;
      }
      if (requested[i].prompt_position >= 0) {
        tasks_[i].state = nullptr;
        tasks_[i].token = request.request.prompt[static_cast<size_t>(requested[i].prompt_position)];
        tasks_[i].logprobs = params.prompt_logprobs;
      } else {
        tasks_[i].state = &request.sampler;
        tasks_[i].mask = masks_->Mask(requested[i].mask);
        tasks_[i].logprobs = params.logprobs;
      }
    }
    row_sampler_->Run(tasks_);
    counters_.seconds_sample += Now() - done;
    for (size_t i = 0; i < requested.size(); ++i) {
      RequestState& request = *requested[i].request;
      if (requested[i].prompt_position < 0) {
        sampled_.push_back({&request, tasks_[i].token, Public(tasks_[i].result)});
      } else if (tasks_[i].result.empty()) {
        request.failure = "the model's logits are not finite";
      } else {
        request.prompt_logprobs[static_cast<size_t>(requested[i].prompt_position)] = Public(tasks_[i].result);
      }
    }
  }
}

// Takes a sampled token: output, stop conditions, or the request's end.
void Core::Accept(Sampled& sampled, double now, std::vector<RequestOutput>& outputs) {
  RequestState& request = *sampled.request;
  const SamplingParams& params = request.sampler.Params();
  if (sampled.token == runner::Sampler::kInvalidLogits) request.failure = "the model's logits are not finite";
  if (!request.failure.empty()) return;
  request.times.last_token = now;
  if (request.Produced() == 0) request.times.first_token = now;
  RequestOutput output = request.Output();
  if (request.Produced() == 0) output.prompt_logprobs = std::move(request.prompt_logprobs);
  if (sampled.token == runner::Sampler::kNothingAllowed) {
    output.finish = FinishReason::kStop;
    outputs.push_back(std::move(output));
    Finish(request, FinishReason::kStop);
    return;
  }
  request.sequence.tokens.push_back(sampled.token);
  request.sampler.Append(sampled.token);
  ++counters_.generated_tokens;
  output.tokens.push_back(sampled.token);
  if (params.logprobs >= 0) output.logprobs.push_back(std::move(sampled.logprobs));
  const bool may_stop = request.Produced() > params.min_tokens || request.request.constraint;
  if (request.Stops(sampled.token) && may_stop) {
    output.finish = FinishReason::kStop;
    output.stop_token = sampled.token;
  } else if (request.Produced() >= params.max_tokens ||
             static_cast<int64_t>(request.sequence.tokens.size()) >= components_.config.max_model_len) {
    output.finish = FinishReason::kLength;
  }
  const FinishReason finish = output.finish;
  outputs.push_back(std::move(output));
  if (finish != FinishReason::kNone) Finish(request, finish);
}

}  // namespace kvanta::engine
