// One step: schedule, forward, sample, accept.
#include <algorithm>

#include "engine/engine_impl.h"
#include "engine/error_text.h"

namespace kvanta {

using engine::ErrorText;

bool Engine::Impl::StepLocked(std::vector<RequestOutput>& outputs) {
  const double start = Now();
  const int64_t tokens_before = counters_.prompt_tokens + counters_.generated_tokens;
  outputs.clear();
  DrainInbox(outputs);
  ExpireRequests(start, outputs);
  try {
    Schedule(outputs);
  } catch (const std::exception& error) {  // out of memory, which no single request can be blamed for
    while (!requests_.empty()) Fail(*requests_.begin()->second, FinishReason::kError, ErrorText(error), outputs);
    return true;
  }
  if (chunks_.empty()) return !outputs.empty();
  bool sampled = false;
  try {
    RunChunks(start);
    scheduler_->Commit();
    SampleRows();
    backend_->FetchCounts();
    sampled = true;
  } catch (const std::exception& error) {
    for (const scheduler::Chunk& chunk : chunks_) {
      Fail(RequestState::Of(*chunk.sequence), FinishReason::kError, ErrorText(error), outputs);
    }
  }
  if (sampled) AcceptRows(outputs);
  ++counters_.steps;
  counters_.CountStepTokens(counters_.prompt_tokens + counters_.generated_tokens - tokens_before);
  counters_.seconds_total += Now() - start;
  return true;
}

void Engine::Impl::Schedule(std::vector<RequestOutput>& outputs) {
  const double start = Now();
  const auto scheduled = scheduler_->Schedule();
  chunks_.assign(scheduled.begin(), scheduled.end());
  counters_.seconds_schedule += Now() - start;
  for (scheduler::Sequence* sequence : scheduler_->Unschedulable()) {
    Fail(RequestState::Of(*sequence), FinishReason::kError,
         ErrorText("{} tokens need more pages than the cache of {} bytes has", sequence->tokens.size(),
                   cache_->pool.BudgetBytes()),
         outputs);
  }
}

void Engine::Impl::RunChunks(double now) {
  if (measure_scales_) MeasureScales(chunks_.front().sequence->tokens);
  items_.clear();
  rows_.clear();
  for (const scheduler::Chunk& chunk : chunks_) {
    RequestState& request = RequestState::Of(*chunk.sequence);
    AddItem(chunk);
    if (request.times.scheduled == 0) {
      request.times.scheduled = now;
      request.counted = chunk.start;  // tokens before it came from the prefix cache
    }
    // Excludes what is computed again after a preemption.
    const int64_t prompt_end = std::min(chunk.start + chunk.tokens, request.PromptTokens());
    counters_.prompt_tokens += std::max<int64_t>(0, prompt_end - request.counted);
    request.counted = std::max(request.counted, prompt_end);
  }
  const double start = Now();
  runner_->Forward(items_, *backend_);
  counters_.seconds_forward += Now() - start;
}

// Adds the chunk to the batch, with its rows of logits: one per log-probability of a prompt token, and one to sample.
void Engine::Impl::AddItem(const scheduler::Chunk& chunk) {
  const RequestState& request = RequestState::Of(*chunk.sequence);
  const SamplingParams& params = request.sampler.Params();
  const std::span<const int32_t> tokens(request.tokens);
  int64_t outputs = chunk.last ? 1 : 0;
  if (request.WantsPromptLogprobs() && request.Produced() == 0) {
    outputs = chunk.tokens;
    const int64_t end = std::min(chunk.start + chunk.tokens, request.PromptTokens() - 1);
    for (int64_t position = chunk.start + 1; position <= end; ++position) {
      rows_.push_back({.item = items_.size(),
                       .prompt_position = position,
                       .logprobs = params.prompt_logprobs,
                       .token = tokens[static_cast<size_t>(position)]});
    }
  }
  if (chunk.last) {
    rows_.push_back({.item = items_.size(),
                     .state = &request.sampler,
                     .logprobs = params.logprobs,
                     .logprob_token_ids = params.logprob_token_ids});
  }
  items_.push_back({.tokens = tokens.subspan(static_cast<size_t>(chunk.start), static_cast<size_t>(chunk.tokens)),
                    .start = chunk.start,
                    .pages = request.pages.Pages(),
                    .first_output = chunk.tokens - outputs});
}

void Engine::Impl::SampleRows() {
  double start = Now();
  masks_->Clear();
  for (const runner::SampleRow& row : rows_) {
    if (row.state != nullptr) masks_->Add(RequestState::Of(*chunks_[row.item].sequence));
  }
  masks_->Fill();
  counters_.seconds_masks += Now() - start;
  size_t mask = 0;
  for (runner::SampleRow& row : rows_) {
    if (row.state == nullptr) continue;
    if (RequestState::Of(*chunks_[row.item].sequence).request.constraint) row.mask = masks_->Mask(mask++);
    if (!runner_->SamplesOnDevice() || !row.mask.empty() || row.logprobs >= 0) continue;
    row.device_params = row.state->NextSample(components_.info.vocab);
  }
  for (size_t first = 0; first < rows_.size(); first += static_cast<size_t>(runner_->MaxLogitRows())) {
    const size_t count = std::min(static_cast<size_t>(runner_->MaxLogitRows()), rows_.size() - first);
    const std::span<runner::SampleRow> rows = std::span(rows_).subspan(first, count);
    start = Now();
    runner_->Logits(static_cast<int64_t>(first), rows);
    const double computed = Now();
    counters_.seconds_forward += computed - start;
    row_sampler_->Run(rows);
    counters_.seconds_sample += Now() - computed;
  }
}

// Gives every request of the batch its sampled token or log-probabilities, or ends it.
void Engine::Impl::AcceptRows(std::vector<RequestOutput>& outputs) noexcept {
  const double now = Now();
  auto row = rows_.begin();
  for (size_t item = 0; item < chunks_.size(); ++item) {
    RequestState& request = RequestState::Of(*chunks_[item].sequence);
    runner::SampleRow* sampled = nullptr;
    for (; row != rows_.end() && row->item == item; ++row) {
      const bool valid = row->state == nullptr ? !row->result.empty() : row->token != runner::Sampler::kInvalidLogits;
      if (!valid) {
        request.failure = ErrorText("the model's logits are not finite");
      } else if (row->state == nullptr) {
        request.prompt_logprobs[static_cast<size_t>(row->prompt_position)] = std::move(row->result);
      } else {
        sampled = &*row;
      }
    }
    if (!request.failure.empty()) {
      Fail(request, FinishReason::kError, std::move(request.failure), outputs);
    } else if (sampled != nullptr) {
      Accept(request, *sampled, now, outputs);
    }
  }
}

// Takes a sampled token: output, stop conditions, or the request's end.
void Engine::Impl::Accept(RequestState& request, runner::SampleRow& row, double now,
                          std::vector<RequestOutput>& outputs) noexcept {
  const SamplingParams& params = request.sampler.Params();
  FinishReason finish = FinishReason::kNone;
  request.times.last_token = now;
  if (request.Produced() == 0) request.times.first_token = now;
  try {
    RequestOutput output = request.Output();
    if (request.Produced() == 0) output.prompt_logprobs = std::move(request.prompt_logprobs);
    if (row.token == runner::Sampler::kNothingAllowed) {
      finish = FinishReason::kStop;
    } else {
      output.tokens.push_back(row.token);
      if (params.logprobs >= 0) output.logprobs.push_back(std::move(row.result));
      request.tokens.push_back(row.token);
      request.sampler.Append(row.token);
      ++counters_.generated_tokens;
      const bool may_stop = request.Produced() > params.min_tokens || request.request.constraint;
      if (request.Stops(row.token) && may_stop) {
        finish = FinishReason::kStop;
        output.stop_token = row.token;
      } else if (request.Produced() >= params.max_tokens ||
                 static_cast<int64_t>(request.tokens.size()) >= components_.config.max_model_len) {
        finish = FinishReason::kLength;
      }
    }
    output.finish = finish;
    outputs.push_back(std::move(output));
  } catch (const std::exception& error) {
    Fail(request, FinishReason::kError, ErrorText(error), outputs);
    return;
  }
  if (finish != FinishReason::kNone) Finish(request, finish);
}

}  // namespace kvanta
