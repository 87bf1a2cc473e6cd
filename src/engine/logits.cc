// Whole sequences without requests: teacher-forced logits through the cache, statistics of keys and values.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/engine_impl.h"
#include "kvanta/error.h"
#include "observe/kv_statistics.h"
#include "observe/query_moments.h"

namespace kvanta {

void Engine::Impl::CheckSequence(std::span<const int32_t> tokens) const {
  CheckTokens(tokens, "sequence");
  if (static_cast<int64_t>(tokens.size()) > components_.config.max_model_len) {
    throw InputError(fmt::format("the sequence has {} tokens, max_model_len is {}", tokens.size(),
                                 components_.config.max_model_len));
  }
}

KvStatistics Engine::Impl::CollectStatistics(std::span<const int32_t> tokens, std::span<const float> key_means) {
  CheckStopped("CollectStatistics");
  CheckAlone("CollectStatistics");
  CheckSequence(tokens);
  const StepLock step_lock(*this);
  return observe::CollectKvStatistics(*components_.model, components_.make_backend, components_.layout, tokens,
                                      key_means, components_.config.max_num_batched_tokens);
}

QueryMoments Engine::Impl::CollectQueryMoments(std::span<const int32_t> tokens, bool weighted,
                                               std::span<const int64_t> context_lengths) {
  CheckStopped("CollectQueryMoments");
  CheckAlone("CollectQueryMoments");
  CheckSequence(tokens);
  if (components_.model->Config().AttendsInBothDirections()) {
    throw InputError(fmt::format("queries of {} attend in both directions; +query is of causal attention",
                                 components_.info.architecture));
  }
  for (const int64_t length : context_lengths) {
    if (length < 1 || length > components_.info.max_position) {
      throw InputError(
          fmt::format("a context of {} tokens; this model takes 1 to {}", length, components_.info.max_position));
    }
  }
  const StepLock step_lock(*this);
  return observe::CollectQueryMoments(*components_.model, components_.make_backend, components_.layout, tokens,
                                      components_.config.max_num_batched_tokens, weighted, context_lengths,
                                      components_.positions, *components_.threads);
}

int64_t Engine::Impl::Logits(std::span<const int32_t> tokens, int chunk_tokens, std::span<float> out,
                             bool use_prefix_cache, std::span<const KvCacheEvent> events) {
  CheckStopped("Logits");
  CheckSequence(tokens);
  CheckEvents(events);
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t vocab = components_.info.vocab;
  if (static_cast<int64_t>(out.size()) != count * vocab) {
    throw InputError(fmt::format("out has {} floats; logits of {} tokens x vocabulary of {} are {}", out.size(), count,
                                 vocab, count * vocab));
  }
  if (chunk_tokens < 0) throw InputError(fmt::format("chunk_tokens = {}: must be at least 0", chunk_tokens));
  const int64_t limit = components_.config.max_num_batched_tokens;
  const int64_t chunk = chunk_tokens == 0 ? limit : std::min<int64_t>(chunk_tokens, limit);

  const StepLock step_lock(*this);
  FinishStepsInFlight();  // a pipeline's steps: the passes that follow would take their buffers
  if (!events.empty()) use_prefix_cache = false;
  cache::SequenceCache pages(*cache_, "", use_prefix_cache ? cache::Sharing::kShared : cache::Sharing::kPrivate);
  if (tiers_ && use_prefix_cache) tiers_->LoadNow(tokens, "");
  if (!events.empty()) pages.Replay({events.begin(), events.end()}, std::numeric_limits<int64_t>::max());
  const int64_t cached = pages.MatchPrefix(tokens);
  while (pages.Length() < count) {
    const int64_t start = pages.Length();
    int64_t rows = pages.StepTokens(std::min(chunk, count - start));
    while (!pages.ReplayEvents(tokens) || !pages.Reserve(rows)) {
      if (scheduler_->EndLastPreparation()) continue;
      rows /= 2;  // a smaller step needs fewer exact pages at once
      if (rows == 0) {
        throw ResourceError(fmt::format("the cache of {} bytes has no space for token {} next to {} running requests",
                                        cache_->pool.BudgetBytes(), start, scheduler_->Running()));
      }
    }
    const runner::RunItem item{.tokens = tokens.subspan(static_cast<size_t>(start), static_cast<size_t>(rows)),
                               .start = start,
                               .pages = pages.Pages()};
    runner_->Forward({&item, 1}, *backend_);
    for (int64_t row = 0; row < rows; row += runner_->MaxLogitRows()) {
      const int64_t some = std::min(runner_->MaxLogitRows(), rows - row);
      const std::span<float> part = out.subspan((start + row) * vocab, some * vocab);
      runner_->Logits(row, some, part.data());
      const auto bad = std::ranges::find_if_not(part, [](float logit) { return std::isfinite(logit); });
      if (bad != part.end()) {
        throw InputError(fmt::format("the model's logits at position {} are not finite",
                                     start + row + (bad - part.begin()) / vocab));
      }
    }
    pages.Commit(tokens);
  }
  return cached;
}

}  // namespace kvanta
