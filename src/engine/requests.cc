// Requests on their way in and out: checks, the queue's limit, aborts, deadlines.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/quote.h"
#include "engine/step_lock.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

// Seeds of requests without their own: from the engine's seed and the id, so that a run can be repeated.
uint64_t DeriveSeed(uint64_t seed, const std::string& id) {
  uint64_t hash = 0xCBF29CE484222325ULL ^ seed;
  for (const char c : id) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3ULL;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9ULL;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBULL;
  return hash ^ (hash >> 31);
}

}  // namespace

void Core::CheckTokens(std::span<const int32_t> tokens, const char* what) const {
  if (tokens.empty()) throw InputError(fmt::format("the {} is empty: at least one token is needed", what));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= components_.info.vocab) {
      throw InputError(fmt::format("token {} at position {} of the {}: the model's ids are 0 to {}", tokens[i], i, what,
                                   components_.info.vocab - 1));
    }
  }
}

void Core::CheckRequest(const Request& request) const {
  CheckTokens(request.prompt, "prompt");
  request.sampling.Validate(components_.info.vocab);
  if (request.constraint && !components_.config.fill_masks) {
    throw InputError("the request has a constraint, but the engine has nobody to ask: set fill_masks");
  }
  if (!(std::isfinite(request.timeout_seconds) && request.timeout_seconds >= 0)) {
    throw InputError(
        fmt::format("timeout_seconds = {}: must be finite and at least 0 (none)", request.timeout_seconds));
  }
  if (static_cast<int64_t>(request.prompt.size()) >= components_.config.max_model_len) {
    throw InputError(fmt::format("the prompt has {} tokens: with one token to generate, max_model_len = {} allows {}",
                                 request.prompt.size(), components_.config.max_model_len,
                                 components_.config.max_model_len - 1));
  }
}

std::vector<int32_t> Core::StopTokens(const Request& request) const {
  std::vector<int32_t> stops = request.sampling.stop_token_ids;
  // A constraint that has come to its end allows nothing but an end.
  if (!request.sampling.ignore_eos || request.constraint) {
    for (const int32_t token : components_.info.eos_token_ids) {
      if (token >= 0 && token < components_.info.vocab) stops.push_back(token);
    }
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  return stops;
}

void Core::CheckQueueCapacity() {
  const int64_t limit = components_.config.max_queued_requests;
  if (limit == 0) return;
  // While nobody waits, who comes now takes a free place at the next step.
  const int64_t places = stats_.waiting > 0 ? 0 : components_.config.max_num_seqs - stats_.running;
  const int64_t queued = stats_.waiting + static_cast<int64_t>(inbox_.size());
  if (queued < limit + places) return;
  ++refused_;
  throw QueueFullError(fmt::format("the queue is full: {} requests run and {} wait; max_queued_requests = {}",
                                   stats_.running, queued, limit));
}

void Core::Add(Request request) {
  CheckRequest(request);
  const uint64_t seed = request.sampling.seed.value_or(DeriveSeed(components_.config.seed, request.id));
  std::vector<int32_t> stops = StopTokens(request);
  auto state = std::make_unique<RequestState>(std::move(request), std::move(stops), seed, *cache_);
  const std::lock_guard lock(mutex_);
  if (draining_) throw ResourceError("the engine is stopping: it finishes what runs and takes no more requests");
  if (ids_.contains(state->request.id)) {
    throw InputError(fmt::format("request id {} is in use by an unfinished request", Quote(state->request.id)));
  }
  CheckQueueCapacity();
  ids_.insert(state->request.id);
  inbox_.push_back(std::move(state));
  work_available_.notify_all();
}

void Core::DrainInbox(std::vector<RequestOutput>& outputs) {
  const std::lock_guard lock(mutex_);
  outputs.swap(pending_);
  pending_.clear();
  for (auto& state : inbox_) {
    scheduler_->Add(state->sequence);
    by_sequence_[&state->sequence] = state.get();
    next_deadline_ = std::min(next_deadline_, state->deadline);
    requests_[state->request.id] = std::move(state);
  }
  inbox_.clear();
}

void Core::ExpireRequests(double now, std::vector<RequestOutput>& outputs) {
  if (now < next_deadline_) return;
  next_deadline_ = kNoDeadline;
  std::vector<RequestState*> overdue;
  for (const auto& [id, request] : requests_) {
    if (request->deadline <= now) {
      overdue.push_back(request.get());
    } else {
      next_deadline_ = std::min(next_deadline_, request->deadline);
    }
  }
  for (RequestState* request : overdue) {
    Fail(*request, FinishReason::kTimeout,
         fmt::format("not finished within {} s: {} tokens were made", request->request.timeout_seconds,
                     request->Produced()),
         outputs);
  }
}

void Core::ReleaseRequest(RequestState& request) {
  scheduler_->Remove(request.sequence);
  by_sequence_.erase(&request.sequence);
  const std::string id = request.request.id;
  requests_.erase(id);
}

// Its last output is the caller's to give out.
void Core::Finish(RequestState& request, FinishReason finish) {
  CountFinish(finish);
  if (quality_ && (finish == FinishReason::kStop || finish == FinishReason::kLength)) {
    quality_->Offer(request.sequence.tokens, request.PromptTokens(), request.sampler.Seed());
  }
  {
    const std::lock_guard lock(mutex_);
    ids_.erase(request.request.id);
    // It must not hit a later request of the same id.
    std::erase_if(aborts_, [&](const PendingAbort& abort) { return abort.id == request.request.id; });
  }
  ReleaseRequest(request);
}

void Core::Fail(RequestState& request, FinishReason finish, std::string error, std::vector<RequestOutput>& outputs) {
  RequestOutput output = request.Output();
  output.finish = finish;
  output.error = std::move(error);
  outputs.push_back(std::move(output));
  Finish(request, finish);
}

void Core::AbortNow(const PendingAbort& abort) {
  if (ids_.erase(abort.id) == 0) return;
  const auto waiting =
      std::find_if(inbox_.begin(), inbox_.end(), [&](const auto& state) { return state->request.id == abort.id; });
  RequestOutput output;
  if (waiting != inbox_.end()) {
    output = (*waiting)->Output();
    inbox_.erase(waiting);
  } else {
    RequestState& request = *requests_.at(abort.id);
    output = request.Output();
    ReleaseRequest(request);
  }
  CountFinish(FinishReason::kAbort);
  output.finish = FinishReason::kAbort;
  output.error = abort.reason;
  pending_.push_back(std::move(output));
}

void Core::Abort(const std::string& id, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (busy_) {
    if (ids_.contains(id)) aborts_.push_back({id, reason});
    return;
  }
  AbortNow({id, reason});
  RefreshStats();
  work_available_.notify_all();
}

}  // namespace kvanta::engine
