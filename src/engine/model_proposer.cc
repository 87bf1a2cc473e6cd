#include "engine/model_proposer.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace kvanta::engine {

ModelProposer::Sequence::Sequence(ModelProposer& owner, const std::string& salt, cache::Sharing sharing)
    : pages(*owner.cache_, salt, sharing), owner_(owner) {
  owner.sequences_.push_back(this);
}

ModelProposer::Sequence::~Sequence() {
  std::erase(owner_.sequences_, this);
}

void ModelProposer::Sequence::Clear() noexcept {
  pages.Clear();
  drafted.clear();
}

ModelProposer::ModelProposer(DraftModelSetup setup)
    : setup_(std::move(setup)),
      spec_(setup_.layout, setup_.visibility),
      runner_(*setup_.model, setup_.max_rows, setup_.max_logit_rows, setup_.graphs),
      row_sampler_(*setup_.threads) {}

void ModelProposer::ReserveCache(cache::PagePoolConfig pool) {
  cache_.emplace(setup_.model->ops().device(), setup_.layout, setup_.visibility, pool, setup_.prefix_caching);
  backend_ = setup_.make_backend(cache_->pool, {.layers = setup_.model->AttentionLayers(), .scales = setup_.scales});
}

void ModelProposer::ResetPrefixCache() {
  if (cache_->prefix) cache_->prefix->Clear();
}

DraftModelStats ModelProposer::Stats() const noexcept {
  return {.seconds = seconds_,
          .weight_bytes = setup_.model->WeightBytes(),
          .cache_used_bytes = cache_->pool.UsedBytes(),
          .cache_budget_bytes = cache_->pool.BudgetBytes()};
}

bool ModelProposer::Reserve(Sequence& sequence, int64_t tokens) {
  while (!sequence.pages.Reserve(tokens)) {
    Sequence* oldest = nullptr;
    for (Sequence* other : sequences_) {
      if (other == &sequence || other->round == round_ || other->pages.Length() == 0) continue;
      if (oldest == nullptr || other->round < oldest->round) oldest = other;
    }
    if (oldest == nullptr) return false;
    oldest->Clear();
  }
  return true;
}

void ModelProposer::DraftActive() {
  SampleActive();
  while (!active_.empty()) {
    const double start = Now();
    const auto rows = std::ssize(active_);
    ForwardActive();
    SampleActive();
    pass_seconds_.Add((Now() - start) / PassCost(rows));
  }
}

// Sequences whose draft is complete are active no longer.
void ModelProposer::SampleActive() {
  if (active_.empty()) return;
  rows_.clear();
  for (size_t i = 0; i < active_.size(); ++i) {
    const auto& [item, sequence, limit] = active_[i];
    rows_.push_back({.item = i, .state = &item->sampler, .drafts = sequence->drafted});
    if (!runner_.SamplesOnDevice()) continue;
    rows_.back().device_params = item->sampler.NextSample(setup_.model->Config().vocab, std::ssize(sequence->drafted));
  }
  const std::span<runner::SampleRow> rows(rows_);
  for (size_t first = 0; first < rows.size(); first += static_cast<size_t>(runner_.MaxLogitRows())) {
    const auto some = rows.subspan(first, std::min(rows.size() - first, static_cast<size_t>(runner_.MaxLogitRows())));
    runner_.Logits(static_cast<int64_t>(first), some);
    row_sampler_.Run(some);
  }
  size_t kept = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    const Active active = active_[i];
    const int32_t token = rows_[i].token;
    if (token < 0) continue;  // invalid logits, or none that is allowed
    std::vector<int32_t>& drafted = active.sequence->drafted;
    drafted.push_back(token);
    active.item->draft.push_back(token);
    const bool stops = std::ranges::find(active.item->stop_tokens, token) != active.item->stop_tokens.end();
    if (!stops && std::ssize(drafted) < active.limit) active_[kept++] = active;
  }
  active_.resize(kept);
}

}  // namespace kvanta::engine
