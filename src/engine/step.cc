// One step: schedule, forward, sample, accept.
#include <algorithm>
#include <iterator>

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
    WorkOnLoads();
    Schedule(outputs);
  } catch (const std::exception& error) {  // out of memory, which no single request can be blamed for
    while (!requests_.empty()) Fail(*requests_.begin()->second, FinishReason::kError, ErrorText(error), outputs);
    return true;
  }
  if (chunks_.empty()) return !outputs.empty();
  bool sampled = false;
  try {
    ProposeDrafts();
    const double forward = counters_.seconds_forward;
    RunChunks(start);
    scheduler_->Commit();  // without the drafts, which Accept commits
    SampleRows();
    RecordStepSeconds(counters_.seconds_forward - forward);
    PoolRows();
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
  chunks_.clear();
  for (const bool pooled : {false, true}) {  // embeddings are the last ones
    std::ranges::copy_if(scheduled, std::back_inserter(chunks_), [&](const scheduler::Chunk& chunk) {
      return RequestState::Of(*chunk.sequence).pooler.has_value() == pooled;
    });
  }
  counters_.seconds_schedule += Now() - start;
  for (scheduler::Sequence* sequence : scheduler_->Unschedulable()) {
    Fail(RequestState::Of(*sequence), FinishReason::kError,
         ErrorText("{} tokens need more pages than the cache of {} bytes has", sequence->tokens.size(),
                   cache_->pool.BudgetBytes()),
         outputs);
  }
}

void Engine::Impl::WorkOnLoads() {
  if (!disk_) return;
  disk_->Work(scheduler_->WaitingSequences(), scheduler_->Running());
  if (const std::string warning = disk_->TakeWarning(); !warning.empty()) Warn(warning);
}

void Engine::Impl::RunChunks(double now) {
  if (measure_scales_) MeasureScales(chunks_.front().sequence->tokens);
  items_.clear();
  rows_.clear();
  int64_t step_tokens = 0;
  for (const scheduler::Chunk& chunk : chunks_) {
    RequestState& request = RequestState::Of(*chunk.sequence);
    AddItem(chunk);
    request.load = {};
    step_tokens += chunk.tokens;
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
  if (disk_ && components_.config.role != "decode") disk_->RecordStep(step_tokens, Now() - start);
}

// Adds the chunk to the batch, with its rows of logits: one per log-probability of a prompt token, and one to sample;
// or with the rows that are pooled.
void Engine::Impl::AddItem(const scheduler::Chunk& chunk) {
  const RequestState& request = RequestState::Of(*chunk.sequence);
  const SamplingParams& params = request.sampler.Params();
  const std::span<const int32_t> tokens(request.tokens);
  int64_t outputs = chunk.last ? 1 : 0;
  if (request.pooler) {
    outputs = chunk.tokens - request.pooler->FirstRow(chunk.tokens, chunk.last);
  } else if (request.WantsPromptLogprobs() && request.Produced() == 0) {
    outputs = chunk.tokens;
    const int64_t end = std::min(chunk.start + chunk.tokens, request.PromptTokens() - 1);
    for (int64_t position = chunk.start + 1; position <= end; ++position) {
      rows_.push_back({.item = items_.size(),
                       .prompt_position = position,
                       .logprobs = params.prompt_logprobs,
                       .token = tokens[static_cast<size_t>(position)]});
    }
  }
  const std::span<const int32_t> with_draft(request.speculation.rows);
  for (size_t drafts = 0; chunk.last && !request.pooler && drafts <= static_cast<size_t>(chunk.drafts); ++drafts) {
    rows_.push_back({.item = items_.size(),
                     .state = &request.sampler,
                     .drafts = drafts == 0 ? std::span<const int32_t>() : with_draft.subspan(1, drafts),
                     .logprobs = params.logprobs,
                     .logprob_token_ids = params.logprob_token_ids});
  }
  const std::span<const int32_t> own =
      tokens.subspan(static_cast<size_t>(chunk.start), static_cast<size_t>(chunk.tokens));
  items_.push_back({.tokens = chunk.drafts > 0 ? with_draft : own,
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
    row.device_params = row.state->NextSample(components_.info.vocab, std::ssize(row.drafts));
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

// Gives every request with pooling its rows: the output rows after those of logits.
void Engine::Impl::PoolRows() {
  int64_t first = std::ssize(rows_);
  for (size_t item = 0; item < items_.size(); ++item) {
    std::optional<runner::Pooler>& pooler = RequestState::Of(*chunks_[item].sequence).pooler;
    const int64_t rows = std::ssize(items_[item].tokens) - items_[item].first_output;
    if (!pooler || rows == 0) continue;
    pooler->Add(items_[item].start, runner_->HiddenStates(first, rows));
    first += rows;
  }
}

// Gives every request of the batch its sampled tokens, log-probabilities or embedding, or ends it.
void Engine::Impl::AcceptRows(std::vector<RequestOutput>& outputs) noexcept {
  const double now = Now();
  auto row = rows_.begin();
  for (size_t item = 0; item < chunks_.size(); ++item) {
    RequestState& request = RequestState::Of(*chunks_[item].sequence);
    auto sampled = rows_.end();  // first row of a token to sample
    for (; row != rows_.end() && row->item == item; ++row) {
      if (row->state != nullptr) {
        sampled = std::min(sampled, row);
        continue;
      }
      if (row->result.empty()) request.failure = ErrorText("the model's logits are not finite");
      request.prompt_logprobs[static_cast<size_t>(row->prompt_position)] = std::move(row->result);
    }
    if (sampled != rows_.end() && sampled->token == runner::Sampler::kInvalidLogits) {
      request.failure = ErrorText("the model's logits are not finite");
    }
    if (!request.failure.empty()) {
      Fail(request, FinishReason::kError, std::move(request.failure), outputs);
    } else if (sampled != rows_.end()) {
      Accept(request, {sampled, row}, now, outputs);
    } else if (request.pooler && chunks_[item].last) {
      AcceptEmbedding(request, outputs);
    }
  }
}

void Engine::Impl::AcceptEmbedding(RequestState& request, std::vector<RequestOutput>& outputs) noexcept {
  try {
    RequestOutput output = request.Output();
    output.embedding = request.pooler->Finish();
    output.finish = FinishReason::kStop;
    if (output.embedding.empty()) {
      Fail(request, FinishReason::kError, ErrorText("the model's hidden states are not finite"), outputs);
      return;
    }
    outputs.push_back(std::move(output));
  } catch (const std::exception& error) {
    Fail(request, FinishReason::kError, ErrorText(error), outputs);
    return;
  }
  Finish(request, FinishReason::kStop);
}

// Takes the sampled token of the first row, and of each further one while the draft token before it is the one that was
// sampled.
void Engine::Impl::Accept(RequestState& request, std::span<runner::SampleRow> rows, double now,
                          std::vector<RequestOutput>& outputs) noexcept {
  FinishReason finish = FinishReason::kNone;
  request.times.last_token = now;
  if (request.times.first_token == 0) request.times.first_token = now;
  try {
    RequestOutput output = request.Output();
    if (request.Produced() == 0) output.prompt_logprobs = std::move(request.prompt_logprobs);
    for (runner::SampleRow& row : rows) {
      // The next step comes upon a fault behind an accepted draft.
      if (!row.drafts.empty() &&
          (row.drafts.back() != request.tokens.back() || row.token == runner::Sampler::kInvalidLogits)) {
        break;
      }
      finish = Append(request, row, output);
      if (finish != FinishReason::kNone) break;
    }
    if (rows.size() > 1) CountDraft(request, output, static_cast<int>(rows.size()) - 1);
    output.finish = finish;
    outputs.push_back(std::move(output));
  } catch (const std::exception& error) {
    Fail(request, FinishReason::kError, ErrorText(error), outputs);
    return;
  }
  if (finish != FinishReason::kNone) Finish(request, finish);
}

// Adds a sampled token to the request and its output. Returns the reason to stop, if it is one.
FinishReason Engine::Impl::Append(RequestState& request, runner::SampleRow& row, RequestOutput& output) {
  const SamplingParams& params = request.sampler.Params();
  if (row.token == runner::Sampler::kNothingAllowed) return FinishReason::kStop;
  output.tokens.push_back(row.token);
  if (params.logprobs >= 0) output.logprobs.push_back(std::move(row.result));
  request.tokens.push_back(row.token);
  request.sampler.Append(row.token);
  ++counters_.generated_tokens;
  const bool may_stop = request.Produced() > params.min_tokens || request.request.constraint;
  if (request.Stops(row.token) && may_stop) {
    output.stop_token = row.token;
    return FinishReason::kStop;
  }
  const bool is_full = request.Produced() >= params.max_tokens ||
                       static_cast<int64_t>(request.tokens.size()) >= components_.config.max_model_len;
  return is_full ? FinishReason::kLength : FinishReason::kNone;
}

}  // namespace kvanta
