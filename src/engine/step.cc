// One step: schedule, forward, sample, accept.
#include <algorithm>
#include <iterator>

#include "engine/engine_impl.h"
#include "engine/error_text.h"

namespace kvanta {

using engine::ErrorText;

bool Engine::Impl::StepLocked(std::vector<RequestOutput>& outputs) {
  const double start = Now();
  outputs.clear();
  DrainInbox(outputs);
  ExpireRequests(start, outputs);
  StepBatch& next = steps_.Next();
  try {
    WorkOnLoads();
    Schedule(next, start, outputs);
  } catch (const std::exception& error) {  // out of memory, which no single request can be blamed for
    while (!requests_.empty()) Fail(*requests_.begin()->second, error, outputs);
    return true;
  }
  const bool begins = !next.chunks.empty();
  if (!begins && steps_.Count() == 0) return !outputs.empty();
  if (begins) BeginStep(next, start, outputs);
  // While the pipeline has room, another step begins first.
  if (steps_.Count() > 0 && (!begins || steps_.IsFull())) FinishStep(steps_.PopOldest(), outputs);
  counters_.seconds_total += Now() - start;
  return true;
}

void Engine::Impl::BeginStep(StepBatch& batch, double now, std::vector<RequestOutput>& outputs) {
  try {
    if (spec_decode_) batch.min_acceptance = spec_decode_->Propose(batch.chunks, *scheduler_);
    RunChunks(batch, now);
    scheduler_->Commit();  // without the drafts, which Accept commits
    for (const scheduler::Chunk& chunk : batch.chunks) chunk.sequence->sampling = chunk.last;
    steps_.Push();
  } catch (const std::exception& error) {
    for (const scheduler::Chunk& chunk : batch.chunks) {
      Fail(RequestState::Of(*chunk.sequence), error, outputs);
    }
    batch.requests.clear();
  }
}

void Engine::Impl::FinishStepsInFlight() {
  if (steps_.Count() == 0) return;
  std::vector<RequestOutput> outputs;
  outputs.reserve(steps_.Count() * requests_.size());
  while (steps_.Count() > 0) FinishStep(steps_.PopOldest(), outputs);
  const std::lock_guard lock(mutex_);
  for (RequestOutput& output : outputs) queue_.AddOutput(std::move(output));
}

void Engine::Impl::FinishStep(StepBatch& batch, std::vector<RequestOutput>& outputs) {
  for (const scheduler::Chunk& chunk : batch.chunks) {
    if (chunk.last) chunk.sequence->sampling = false;
  }
  try {
    const double before = counters_.seconds_forward, start = Now();
    runner_->Finish(batch.ticket);
    counters_.seconds_forward += Now() - start;
    SampleRows(batch);
    const double fetch = Now();
    backend_->FetchCounts();  // waits for a GPU that has no row to sample
    counters_.seconds_forward += Now() - fetch;
    batch.seconds += counters_.seconds_forward - before;
    RecordStepSeconds(batch);
    PoolRows(batch);
  } catch (const std::exception& error) {
    for (const auto& request : batch.requests) {
      if (!request->has_ended) Fail(*request, error, outputs);
    }
    batch.requests.clear();
    return;
  }
  const int64_t generated = counters_.generated_tokens;
  AcceptRows(batch, outputs);
  AdvanceStates(batch);
  PassHiddenStates(batch);
  if (!saturation_warned_) WarnOfSaturation();
  RecordStepTime(batch);
  batch.requests.clear();
  ++counters_.steps;
  counters_.prompt_tokens += batch.prompt_tokens;
  counters_.CountStepTokens(batch.prompt_tokens + counters_.generated_tokens - generated);
}

// Records the time of a step, which loads of stored pages and passes of a draft model are compared with.
void Engine::Impl::RecordStepSeconds(const StepBatch& batch) {
  const auto rows = static_cast<int64_t>(batch.work.rows);
  if (tiers_ && components_.config.role != "decode") tiers_->RecordStep(rows, batch.seconds);
  if (spec_decode_) spec_decode_->RecordStep(rows, batch.seconds);
}

// The clock of a step that began at `start`; none if steps may take any time.
std::optional<scheduler::StepClock> Engine::Impl::ClockOf(double start) const {
  const std::optional<double>& limit = components_.config.max_step_ms;
  if (limit ? *limit == 0 : !serves_) return std::nullopt;
  const double now = Now();
  return scheduler::StepClock{.now = now, .spent = now - start};
}

// Records what the step took from its own begin, or from the end of the step before it in a pipeline, to its end.
void Engine::Impl::RecordStepTime(const StepBatch& batch) {
  const double now = Now();
  const double seconds = now - std::max(batch.begin, last_step_end_);
  last_step_end_ = now;
  counters_.CountPrediction(batch.expected_seconds, seconds);
  scheduler_->TimeModel().Record(batch.work, seconds);
}

void Engine::Impl::Schedule(StepBatch& batch, double step_start, std::vector<RequestOutput>& outputs) {
  const double start = Now();
  const auto scheduled = scheduler_->Schedule(ClockOf(step_start));
  batch.chunks.clear();
  for (const bool pooled : {false, true}) {  // embeddings are the last ones
    std::ranges::copy_if(scheduled, std::back_inserter(batch.chunks), [&](const scheduler::Chunk& chunk) {
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
  if (!tiers_) return;
  tiers_->Work(*scheduler_);
  if (const std::string warning = tiers_->TakeWarning(); !warning.empty()) Warn(warning);
}

void Engine::Impl::RunChunks(StepBatch& batch, double now) {
  batch.items.clear();
  batch.rows.clear();
  batch.requests.clear();
  batch.accepted_drafts.assign(batch.chunks.size(), 0);
  batch.prompt_tokens = 0;
  for (const scheduler::Chunk& chunk : batch.chunks) {
    RequestState& request = RequestState::Of(*chunk.sequence);
    batch.requests.push_back(request.shared_from_this());
    AddItem(batch, chunk);
    if (request.times.scheduled == 0) {
      request.times.scheduled = now;
      request.counted = chunk.start;  // tokens before it came from the prefix cache
    }
    // Excludes what is computed again after a preemption.
    const int64_t prompt_end = std::min(chunk.start + chunk.tokens, request.PromptTokens());
    batch.prompt_tokens += std::max<int64_t>(0, prompt_end - request.counted);
    request.counted = std::max(request.counted, prompt_end);
  }
  const double start = Now();
  batch.begin = start;
  batch.work = {};
  for (const runner::RunItem& item : batch.items) {
    scheduler_->TimeModel().Add(batch.work, item.start, std::ssize(item.tokens), 0);
  }
  batch.work.logits = static_cast<double>(batch.rows.size());
  batch.expected_seconds = scheduler_->TimeModel().Seconds(batch.work);
  batch.ticket = runner_->Begin(batch.items, *backend_);
  batch.seconds = Now() - start;
  counters_.seconds_forward += batch.seconds;
}

// Adds the chunk to the batch, with its rows of logits: one per log-probability of a prompt token, and one to sample;
// or with the rows that are pooled.
void Engine::Impl::AddItem(StepBatch& batch, const scheduler::Chunk& chunk) {
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
      batch.rows.push_back({.item = batch.items.size(),
                            .prompt_position = position,
                            .logprobs = params.prompt_logprobs,
                            .token = tokens[static_cast<size_t>(position)]});
    }
  }
  const std::span<const int32_t> with_draft(request.speculation.rows);
  for (size_t drafts = 0; chunk.last && !request.pooler && drafts <= static_cast<size_t>(chunk.drafts); ++drafts) {
    batch.rows.push_back({.item = batch.items.size(),
                          .state = &request.sampler,
                          .drafts = drafts == 0 ? std::span<const int32_t>() : with_draft.subspan(1, drafts),
                          .logprobs = params.logprobs,
                          .logprob_token_ids = params.logprob_token_ids});
  }
  const std::span<const int32_t> own =
      tokens.subspan(static_cast<size_t>(chunk.start), static_cast<size_t>(chunk.tokens));
  batch.items.push_back({.tokens = chunk.drafts > 0 ? with_draft : own,
                         .start = chunk.start,
                         .pages = request.pages.Pages(),
                         .first_output = chunk.tokens - outputs,
                         .drafts = chunk.drafts});
}

void Engine::Impl::SampleRows(StepBatch& batch) {
  double start = Now();
  masks_->Clear();
  for (const runner::SampleRow& row : batch.rows) {
    if (row.state != nullptr) masks_->Add(RequestState::Of(*batch.chunks[row.item].sequence));
  }
  masks_->Fill();
  counters_.seconds_masks += Now() - start;
  size_t mask = 0;
  for (runner::SampleRow& row : batch.rows) {
    if (row.state == nullptr) continue;
    if (RequestState::Of(*batch.chunks[row.item].sequence).request.constraint) row.mask = masks_->Mask(mask++);
    if (!runner_->SamplesOnDevice() || !row.mask.empty() || row.logprobs >= 0) continue;
    row.device_params = row.state->NextSample(components_.info.vocab, std::ssize(row.drafts));
  }
  for (size_t first = 0; first < batch.rows.size(); first += static_cast<size_t>(runner_->MaxLogitRows())) {
    const size_t count = std::min(static_cast<size_t>(runner_->MaxLogitRows()), batch.rows.size() - first);
    const std::span<runner::SampleRow> rows = std::span(batch.rows).subspan(first, count);
    start = Now();
    runner_->Logits(static_cast<int64_t>(first), rows);
    const double computed = Now();
    counters_.seconds_forward += computed - start;
    row_sampler_->Run(rows);
    counters_.seconds_sample += Now() - computed;
  }
}

// Gives every request with pooling its rows: the output rows after those of logits.
void Engine::Impl::PoolRows(StepBatch& batch) {
  int64_t first = std::ssize(batch.rows);
  for (size_t item = 0; item < batch.items.size(); ++item) {
    std::optional<runner::Pooler>& pooler = RequestState::Of(*batch.chunks[item].sequence).pooler;
    const int64_t rows = std::ssize(batch.items[item].tokens) - batch.items[item].first_output;
    if (!pooler || rows == 0) continue;
    pooler->Add(batch.items[item].start, runner_->HiddenStates(first, rows));
    first += rows;
  }
}

// Gives every request of the batch its sampled tokens, log-probabilities or embedding, or ends it.
void Engine::Impl::AcceptRows(StepBatch& batch, std::vector<RequestOutput>& outputs) noexcept {
  const double now = Now();
  auto row = batch.rows.begin();
  const auto end = batch.rows.end();
  for (size_t item = 0; item < batch.chunks.size(); ++item) {
    RequestState& request = *batch.requests[item];
    auto sampled = end;  // first row of a token to sample
    for (; row != end && row->item == item; ++row) {
      if (request.has_ended) continue;
      if (row->state != nullptr) {
        sampled = std::min(sampled, row);
        continue;
      }
      if (row->result.empty()) request.failure = ErrorText("the model's logits are not finite");
      request.prompt_logprobs[static_cast<size_t>(row->prompt_position)] = std::move(row->result);
    }
    if (request.has_ended) continue;
    if (sampled != end && sampled->token == runner::Sampler::kInvalidLogits) {
      request.failure = ErrorText("the model's logits are not finite");
    }
    if (!request.failure.empty()) {
      Fail(request, FinishReason::kError, std::move(request.failure), outputs);
    } else if (sampled != end) {
      batch.accepted_drafts[item] = Accept(request, {sampled, row}, batch.min_acceptance, now, outputs);
    } else if (request.pooler && batch.chunks[item].last) {
      AcceptEmbedding(request, outputs);
    }
  }
}

// Advances the states of recurrent layers over the accepted drafts of sequences that go on.
void Engine::Impl::AdvanceStates(const StepBatch& batch) noexcept {
  if (!has_states_) return;
  const double start = Now();
  runner_->AcceptDrafts(batch.accepted_drafts, *backend_);
  counters_.seconds_forward += Now() - start;
}

// Gives the proposer the hidden states of rows that stay in the cache, where it reads them.
void Engine::Impl::PassHiddenStates(const StepBatch& batch) noexcept {
  if (!spec_decode_ || !spec_decode_->ReadsHiddenStates()) return;
  const float* hidden = runner_->AllHiddenStates();
  for (size_t item = 0; item < batch.chunks.size(); ++item) {
    const scheduler::Chunk& chunk = batch.chunks[item];
    RequestState& request = *batch.requests[item];
    if (!request.has_ended) spec_decode_->AddRows(request, chunk, batch.accepted_drafts[item], hidden);
    hidden += std::ssize(batch.items[item].tokens) * components_.info.hidden;
  }
  spec_decode_->PassRows();
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
    Fail(request, error, outputs);
    return;
  }
  Finish(request, FinishReason::kStop);
}

// Takes the sampled token of the first row, and of each further one while the draft token before it is the one that was
// sampled. Returns the draft tokens that stay in the cache; 0 if the request ends.
int Engine::Impl::Accept(RequestState& request, std::span<runner::SampleRow> rows, float min_acceptance, double now,
                         std::vector<RequestOutput>& outputs) noexcept {
  FinishReason finish = FinishReason::kNone;
  int accepted = 0;
  request.times.last_token = now;
  if (request.times.first_token == 0) request.times.first_token = now;
  try {
    RequestOutput output = request.Output();
    if (request.Produced() == 0) output.prompt_logprobs = std::move(request.prompt_logprobs);
    for (runner::SampleRow& row : rows) {
      // Invalid logits after an accepted draft token are reported by the next step, which recomputes them.
      if (!row.drafts.empty() &&
          (row.drafts.back() != request.tokens.back() || row.token == runner::Sampler::kInvalidLogits)) {
        break;
      }
      finish = Append(request, row, output);
      if (finish != FinishReason::kNone) break;
    }
    if (rows.size() > 1) {
      spec_decode_->Commit(request, output, static_cast<int>(rows.size()) - 1, min_acceptance);
      accepted = std::max(0, static_cast<int>(output.tokens.size()) - 1);
      scheduler_->ChargeDrafts(request, accepted);
    }
    output.finish = finish;
    outputs.push_back(std::move(output));
  } catch (const std::exception& error) {
    Fail(request, error, outputs);
    return 0;
  }
  if (finish == FinishReason::kNone) return accepted;
  Finish(request, finish);
  return 0;
}

// Adds a sampled token to the request and its output. Returns the reason to stop, if it is one.
FinishReason Engine::Impl::Append(RequestState& request, runner::SampleRow& row, RequestOutput& output) {
  const SamplingParams& params = request.sampler.Params();
  if (row.token == runner::Sampler::kNothingAllowed) return FinishReason::kStop;
  output.tokens.push_back(row.token);
  if (params.logprobs >= 0) output.logprobs.push_back(std::move(row.result));
  request.tokens.push_back(row.token);
  request.answered = true;
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
