// One step: schedule, run, sample, postprocess.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "engine/core.h"

namespace kvanta::engine {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<TokenLogprob> Public(const std::vector<runner::Logprob>& logprobs) {
  std::vector<TokenLogprob> result;
  result.reserve(logprobs.size());
  for (const runner::Logprob& entry : logprobs) result.push_back({entry.token, entry.logprob, entry.rank});
  return result;
}

}  // namespace

void Core::TakeNotes(std::vector<RequestOutput>& outputs) {
  const std::lock_guard lock(mutex_);
  outputs.swap(pending_);
  pending_.clear();
  for (auto& state : inbox_) {
    scheduler_->Add(state->sequence);
    by_sequence_[&state->sequence] = state.get();
    requests_[state->request.id] = std::move(state);
  }
  inbox_.clear();
}

bool Core::StepWithTurn(std::vector<RequestOutput>& outputs) {
  const Clock::time_point start = Clock::now();
  outputs.clear();
  TakeNotes(outputs);
  const auto fail = [&](RequestState& request, const std::string& error) {
    RequestOutput output = OutputOf(request);
    output.finish = FinishReason::kError;
    output.error = error;
    outputs.push_back(std::move(output));
    Finish(request);
  };
  try {
    const auto scheduled = scheduler_->Schedule();
    chunks_.assign(scheduled.begin(), scheduled.end());
  } catch (const std::exception& error) {  // out of memory: nobody knows whose
    std::vector<RequestState*> all;
    for (const auto& [id, request] : requests_) all.push_back(request.get());
    for (RequestState* request : all) fail(*request, error.what());
    return true;
  }
  for (scheduler::Sequence* sequence : scheduler_->Unschedulable()) {
    fail(*by_sequence_.at(sequence), fmt::format("{} tokens need more pages than the cache of {} bytes has",
                                                 sequence->tokens.size(), store_->BudgetBytes()));
  }
  if (chunks_.empty()) return !outputs.empty();
  try {
    RunChunks(chunks_);
    scheduler_->Commit();
    SampleRows();
  } catch (const std::exception& error) {
    for (const scheduler::Chunk& chunk : chunks_) fail(*by_sequence_.at(chunk.sequence), error.what());
    sampled_.clear();
  }
  for (Sampled& sampled : sampled_) Accept(sampled, outputs);
  for (const scheduler::Chunk& chunk : chunks_) {
    const auto request = by_sequence_.find(chunk.sequence);
    if (request != by_sequence_.end() && !request->second->failure.empty()) {
      fail(*request->second, std::string(request->second->failure));
    }
  }
  ++counters_.steps;
  counters_.seconds_total += SecondsSince(start);
  return true;
}

void Core::RunChunks(std::span<const scheduler::Chunk> chunks) {
  if (measure_scales_) MeasureScales(chunks.front().sequence->tokens);
  items_.clear();
  wanted_.clear();
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
        wanted_.push_back({&request, row + position - chunk.start, position + 1});
      }
    }
    row += chunk.tokens;
    if (chunk.last) wanted_.push_back({&request, row - 1, -1});
    if (request.sequence.preemptions == 0 && chunk.start < request.PromptTokens()) {
      counters_.prompt_tokens += std::min<int64_t>(chunk.tokens, request.PromptTokens() - chunk.start);
      // The first chunk starts behind what the prefix cache had.
      if (chunk.start == request.sequence.cached_tokens) counters_.cached_tokens += chunk.start;
    }
  }
  const Clock::time_point start = Clock::now();
  runner_->Forward(items_, *backend_);
  counters_.seconds_forward += SecondsSince(start);
}

void Core::SampleRows() {
  sampled_.clear();
  const auto vocab = static_cast<size_t>(parts_.info.vocab);
  const auto most = static_cast<size_t>(runner_->MaxLogitRows());
  for (size_t first = 0; first < wanted_.size(); first += most) {
    const auto wanted = std::span(wanted_).subspan(first, std::min(most, wanted_.size() - first));
    rows_.clear();
    for (const WantedRow& want : wanted) rows_.push_back(want.row);
    const Clock::time_point start = Clock::now();
    const std::span<float> logits = runner_->Logits(rows_);
    counters_.seconds_forward += SecondsSince(start);
    tasks_.resize(wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      const RequestState& request = *wanted[i].request;
      const SamplingParams& params = request.sampler.Params();
      tasks_[i].logits = logits.subspan(i * vocab, vocab);
      tasks_[i].result.clear();
      if (wanted[i].prompt_position >= 0) {
        tasks_[i].state = nullptr;
        tasks_[i].token = request.request.prompt[static_cast<size_t>(wanted[i].prompt_position)];
        tasks_[i].logprobs = params.prompt_logprobs;
      } else {
        tasks_[i].state = &request.sampler;
        tasks_[i].logprobs = params.logprobs;
      }
    }
    row_sampler_->Run(tasks_);
    for (size_t i = 0; i < wanted.size(); ++i) {
      RequestState& request = *wanted[i].request;
      if (wanted[i].prompt_position < 0) {
        sampled_.push_back({&request, tasks_[i].token, Public(tasks_[i].result)});
      } else if (tasks_[i].result.empty()) {
        request.failure = "the model's logits are not finite";
      } else {
        request.prompt_logprobs[static_cast<size_t>(wanted[i].prompt_position)] = Public(tasks_[i].result);
      }
    }
  }
}

void Core::Finish(RequestState& request) {
  {
    const std::lock_guard lock(mutex_);
    ids_.erase(request.request.id);
    std::erase(aborts_, request.request.id);  // it must not hit a later request of the same id
  }
  Forget(request);
}

// Takes a sampled token: output, stop conditions, or the request's end.
void Core::Accept(Sampled& sampled, std::vector<RequestOutput>& outputs) {
  RequestState& request = *sampled.request;
  const SamplingParams& params = request.sampler.Params();
  if (sampled.token == runner::Sampler::kInvalidLogits) request.failure = "the model's logits are not finite";
  if (!request.failure.empty()) return;
  RequestOutput output = OutputOf(request);
  if (request.Produced() == 0) output.prompt_logprobs = std::move(request.prompt_logprobs);
  request.sequence.tokens.push_back(sampled.token);
  request.sampler.Append(sampled.token);
  ++counters_.generated_tokens;
  output.tokens.push_back(sampled.token);
  if (params.logprobs >= 0) output.logprobs.push_back(std::move(sampled.logprobs));
  if (request.Stops(sampled.token) && request.Produced() > params.min_tokens) {
    output.finish = FinishReason::kStop;
    output.stop_token = sampled.token;
  } else if (request.Produced() >= params.max_tokens ||
             static_cast<int64_t>(request.sequence.tokens.size()) >= parts_.config.max_model_len) {
    output.finish = FinishReason::kLength;
  }
  const bool finished = output.finish != FinishReason::kNone;
  outputs.push_back(std::move(output));
  if (finished) Finish(request);
}

}  // namespace kvanta::engine
