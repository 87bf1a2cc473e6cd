// Start and end of requests: checks, the queue's limit, aborts, deadlines.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/quote.h"
#include "engine/engine_impl.h"
#include "engine/error_text.h"
#include "kvanta/error.h"

namespace kvanta {

using engine::ErrorText;

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

void Engine::Impl::CheckTokens(std::span<const int32_t> tokens, const char* what, const char* field) const {
  if (tokens.empty()) throw InputError(fmt::format("the {} is empty: at least one token is needed", what), field);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= components_.info.vocab) {
      throw InputError(fmt::format("token {} at position {} of the {}: the model's ids are 0 to {}", tokens[i], i, what,
                                   components_.info.vocab - 1),
                       field);
    }
  }
}

void Engine::Impl::CheckEvents(std::span<const KvCacheEvent> events) const {
  const int floors = cache_->spec.floors;
  int64_t before = 0;
  for (const KvCacheEvent& event : events) {
    const auto refuse = [&](const std::string& why) {
      throw InputError(fmt::format("kv_cache_events: pages {} to {} at level {} from position {} on: {}",
                                   event.first_page, event.end_page, event.level, event.position, why),
                       "kv_cache_events");
    };
    if (floors == 0) refuse("this engine has no kv_cache_floor");
    if (event.level < 1 || event.level > floors) refuse(fmt::format("levels are from 1 to {}", floors));
    if (event.position < before) refuse(fmt::format("the event before it has position {}", before));
    const int64_t closed = event.position / components_.config.page_size;
    if (event.first_page < 0 || event.first_page >= event.end_page || event.end_page > closed) {
      refuse(fmt::format("{} pages are before this position; the first of a range is less than its end", closed));
    }
    before = event.position;
  }
}

void Engine::Impl::CheckRequest(const Request& request) const {
  CheckTokens(request.prompt, "prompt", "prompt");
  request.sampling.Validate(components_.info.vocab);
  if (request.constraint && !components_.config.fill_masks) {
    throw InputError("the request has a constraint, but fill_masks is not set");
  }
  if (!(std::isfinite(request.timeout_seconds) && request.timeout_seconds >= 0)) {
    throw InputError(
        fmt::format("timeout_seconds = {}: must be finite and at least 0 (none)", request.timeout_seconds));
  }
  if (request.sampling.cache_ttl > 0 && components_.config.max_cache_ttl == 0) {
    throw InputError(fmt::format("cache_ttl = {}: no prefix is kept for a time, since max_cache_ttl is 0",
                                 request.sampling.cache_ttl),
                     "cache_ttl");
  }
  if (request.sampling.kv_cache_events) CheckEvents(*request.sampling.kv_cache_events);
  const auto prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const auto generated = static_cast<int64_t>(request.generated.size());
  if (generated > 0) {
    CheckTokens(request.generated, "generated tokens");
    const int64_t max_tokens = request.pooling ? 0 : request.sampling.max_tokens;
    if (generated >= max_tokens || prompt_tokens + generated >= components_.config.max_model_len) {
      throw InputError(
          fmt::format("the request has {} generated tokens: nothing can follow them, for max_tokens = {} and "
                      "max_model_len = {}",
                      generated, max_tokens, components_.config.max_model_len));
    }
  }
  if (request.pooling) {
    request.pooling->Validate(components_.info.embedding_size);
    if (request.constraint || request.sampling.prompt_logprobs >= 0) {
      throw InputError(fmt::format("a request with pooling has no tokens: it cannot have {}",
                                   request.constraint ? "a constraint" : "prompt_logprobs"));
    }
    if (prompt_tokens > components_.config.max_model_len) {
      throw InputError(
          fmt::format("the prompt has {} tokens, max_model_len is {}", prompt_tokens, components_.config.max_model_len),
          "prompt");
    }
  } else if (!components_.info.has_lm_head) {
    throw InputError("the checkpoint has no lm_head.weight: its model embeds texts, and generates none");
  } else if (prompt_tokens >= components_.config.max_model_len) {
    throw InputError(fmt::format("the prompt has {} tokens: with one token to generate, max_model_len = {} allows {}",
                                 prompt_tokens, components_.config.max_model_len, components_.config.max_model_len - 1),
                     "prompt");
  }
}

std::vector<int32_t> Engine::Impl::StopTokens(const Request& request) const {
  std::vector<int32_t> stops = request.sampling.stop_token_ids;
  // A constraint that is complete allows nothing but a stop token.
  if (!request.sampling.ignore_eos || request.constraint) {
    for (const int32_t token : components_.info.eos_token_ids) {
      if (token >= 0 && token < components_.info.vocab) stops.push_back(token);
    }
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  return stops;
}

void Engine::Impl::CheckQueueCapacity() {
  const int64_t limit = components_.config.max_queued_requests;
  if (limit == 0) return;
  // While no request waits, a new one takes a free place at the next step.
  const int64_t places = stats_.waiting > 0 ? 0 : components_.config.max_num_seqs - stats_.running;
  const int64_t queued = stats_.waiting + queue_.Waiting();
  if (queued < limit + places) return;
  ++refused_;
  throw QueueFullError(fmt::format("the queue is full: {} requests run and {} wait; max_queued_requests = {}",
                                   stats_.running, queued, limit));
}

void Engine::Impl::Add(Request request) {
  CheckRequest(request);
  if (components_.config.role == "prefill") {
    request.sampling.max_tokens = 1;
    request.sampling.min_tokens = std::min(request.sampling.min_tokens, 1);
  }
  const uint64_t seed = request.sampling.seed.value_or(DeriveSeed(components_.config.seed, request.id));
  std::vector<int32_t> stops = StopTokens(request);
  auto state = std::make_shared<RequestState>(std::move(request), std::move(stops), seed, *cache_);
  if (state->request.pooling) {
    const models::ModelConfig& model = components_.model->Config();
    state->pooler.emplace(*state->request.pooling, model.hidden, model.logits_divisor, components_.dense_modules);
    if (state->pooler->ReadsEveryToken()) state->skip_prefix_match = true;
  }
  const std::lock_guard lock(mutex_);
  if (draining_) throw ResourceError("the engine is stopping: it finishes what runs and takes no more requests");
  if (queue_.Contains(state->request.id)) {
    throw InputError(fmt::format("request id {} is in use by an unfinished request", Quote(state->request.id)));
  }
  CheckQueueCapacity();
  queue_.Add(std::move(state));
  work_available_.notify_all();
}

// Hands the added requests to the scheduler. Throws only before anything has changed.
void Engine::Impl::DrainInbox(std::vector<RequestOutput>& outputs) {
  const std::lock_guard lock(mutex_);
  loads_progressed_ = false;
  queue_.TakeOutputs(outputs);
  queue_.TakeAll([&](std::shared_ptr<RequestState>& state) {
    RequestState& request = *state;
    const std::string_view id = request.request.id;
    try {
      auto& place = requests_[id];
      if (tiers_) tiers_->Lookup(request);
      scheduler_->Add(request);
      place = std::move(state);
      next_deadline_ = std::min(next_deadline_, request.deadline);
    } catch (const std::exception& error) {
      if (tiers_) tiers_->Cancel(request);
      requests_.erase(id);
      queue_.Release(request.request.id);
      CountFinish(FinishReason::kError);
      outputs.push_back(request.LastOutput(FinishReason::kError, ErrorText(error)));
    }
  });
}

void Engine::Impl::ExpireRequests(double now, std::vector<RequestOutput>& outputs) {
  if (now < next_deadline_) return;
  next_deadline_ = engine::kNoDeadline;
  for (auto next = requests_.begin(); next != requests_.end();) {
    RequestState& request = *(next++)->second;
    if (request.deadline > now) {
      next_deadline_ = std::min(next_deadline_, request.deadline);
      continue;
    }
    Fail(request, FinishReason::kTimeout,
         ErrorText("not finished within {} s: {} tokens were generated", request.request.timeout_seconds,
                   request.Produced()),
         outputs);
  }
}

// Frees its pages and takes it out of requests_; the caller keeps it for its last output.
std::shared_ptr<engine::RequestState> Engine::Impl::ReleaseRequest(RequestState& request) noexcept {
  if (tiers_) tiers_->Cancel(request);
  try {
    scheduler_->Remove(request);
  } catch (const std::exception&) {  // no memory to keep the end of a prefix: ~RequestState frees the pages
  }
  request.has_ended = true;
  const auto place = requests_.find(request.request.id);
  std::shared_ptr<RequestState> state = std::move(place->second);
  requests_.erase(place);
  return state;
}

std::shared_ptr<engine::RequestState> Engine::Impl::Finish(RequestState& request, FinishReason finish) noexcept {
  CountFinish(finish);
  if (quality_ && !request.pooler && (finish == FinishReason::kStop || finish == FinishReason::kLength)) {
    quality_->Enqueue(request.tokens, request.PromptTokens(), request.sampler.Seed());
  }
  {
    const std::lock_guard lock(mutex_);
    queue_.Release(request.request.id);
  }
  std::shared_ptr<RequestState> state = ReleaseRequest(request);
  PinPrefix(*state);
  return state;
}

// Keeps the pages of a request that ends for its cache_ttl.
void Engine::Impl::PinPrefix(const RequestState& request) noexcept {
  const double seconds = std::min(request.request.sampling.cache_ttl, components_.config.max_cache_ttl);
  if (seconds <= 0 || !cache_->prefix || request.pooler) return;
  try {
    const auto pages = std::ssize(request.tokens) / components_.config.page_size;
    cache_->prefix->Pin(request.tokens, request.request.cache_salt, pages, seconds,
                        cache::MaxPinnedBytes(cache_->pool.BudgetBytes() * cache_->pool.Ranks()));
  } catch (const std::exception&) {  // no memory: they stay cached as others do
  }
}

void Engine::Impl::Fail(RequestState& request, FinishReason finish, std::string error,
                        std::vector<RequestOutput>& outputs) noexcept {
  outputs.push_back(Finish(request, finish)->LastOutput(finish, std::move(error)));
}

void Engine::Impl::Fail(RequestState& request, const std::exception& error,
                        std::vector<RequestOutput>& outputs) noexcept {
  Fail(request, FinishReason::kError, ErrorText(error), outputs);
  if (const auto* loss = dynamic_cast<const RankLostError*>(&error)) outputs.back().lost_rank = loss->Rank();
}

void Engine::Impl::AbortNow(engine::RequestQueue::PendingAbort abort) noexcept {
  if (!queue_.Contains(abort.id)) return;
  std::shared_ptr<RequestState> state = queue_.Take(abort.id);
  if (!state) state = ReleaseRequest(*requests_.at(abort.id));
  queue_.Release(abort.id);
  CountFinish(FinishReason::kAbort);
  queue_.AddOutput(state->LastOutput(FinishReason::kAbort, std::move(abort.reason)));
}

void Engine::Impl::Abort(const std::string& id, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!queue_.Contains(id)) return;
  if (step_lock_.Held()) {
    queue_.AddAbort({id, reason});
    return;
  }
  AbortNow({id, reason});
  RefreshStats();
  work_available_.notify_all();
}

}  // namespace kvanta
