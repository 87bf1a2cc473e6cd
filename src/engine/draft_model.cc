#include "engine/draft_model.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/clock.h"
#include "cache/sequence_cache.h"

namespace kvanta::engine {

class DraftModel::Sequence : public DraftProposer::State {
 public:
  Sequence(DraftModel& owner, const std::string& salt) : pages(*owner.cache_, salt), owner_(owner) {
    owner.sequences_.push_back(this);
  }
  ~Sequence() override { std::erase(owner_.sequences_, this); }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  static Sequence& Of(const Item& item) noexcept { return static_cast<Sequence&>(item.state); }
  void Clear() noexcept {
    pages.Clear();
    drafted.clear();
  }

  cache::SequenceCache pages;    // its length: tokens of the request
  std::vector<int32_t> drafted;  // last draft; K and V of all but the last token follow those of `pages`
  int64_t round = 0;             // round of the last proposal

 private:
  DraftModel& owner_;
};

DraftModel::DraftModel(DraftModelSetup setup)
    : setup_(std::move(setup)),
      spec_(setup_.layout, setup_.visibility),
      runner_(*setup_.model, setup_.max_rows, setup_.max_logit_rows, setup_.graphs),
      row_sampler_(*setup_.threads) {}

DraftModel::~DraftModel() = default;

void DraftModel::ReserveCache(cache::PagePoolConfig pool) {
  cache_.emplace(setup_.model->ops().device(), setup_.layout, setup_.visibility, pool, setup_.prefix_caching);
  backend_ = setup_.make_backend(cache_->pool, {.layers = setup_.model->AttentionLayers(), .scales = setup_.scales});
}

void DraftModel::ResetPrefixCache() {
  if (cache_->prefix) cache_->prefix->Clear();
}

DraftModelStats DraftModel::Stats() const noexcept {
  return {.seconds = seconds_,
          .weight_bytes = setup_.model->WeightBytes(),
          .cache_used_bytes = cache_->pool.UsedBytes(),
          .cache_budget_bytes = cache_->pool.BudgetBytes()};
}

std::unique_ptr<DraftProposer::State> DraftModel::MakeState(const std::string& salt) {
  return std::make_unique<Sequence>(*this, salt);
}

void DraftModel::Propose(std::span<Item> items) {
  const double start = Now();
  ++round_;
  try {
    CatchUp(items);
    SampleActive();
    while (!active_.empty()) {
      const double pass_start = Now();
      const auto rows = std::ssize(active_);
      ForwardActive();
      SampleActive();
      pass_seconds_.Add((Now() - pass_start) / PassCost(rows));
    }
  } catch (...) {  // no memory: nothing is known of the last pass
    for (const Item& item : items) Sequence::Of(item).Clear();
    throw;
  }
  seconds_ += Now() - start;
}

// Commits the tokens of the last draft that became tokens of the request.
void DraftModel::KeepAccepted(Item& item) {
  Sequence& sequence = Sequence::Of(item);
  sequence.round = round_;
  if (sequence.pages.Length() == 0) {
    sequence.pages.MatchPrefix(item.tokens);
  } else if (!sequence.drafted.empty()) {
    const auto behind = item.tokens.subspan(static_cast<size_t>(sequence.pages.Length()));
    const std::span<const int32_t> computed =
        std::span<const int32_t>(sequence.drafted).first(sequence.drafted.size() - 1);
    sequence.pages.Extend(std::ranges::mismatch(computed, behind).in1 - computed.begin());
  }
  sequence.drafted.clear();
}

// Computes tokens that the draft model has not seen. Sequences with few come first, so that a long prompt does not keep
// others from their drafts. Those that reach their last token are active.
void DraftModel::CatchUp(std::span<Item> items) {
  active_.clear();
  run_items_.clear();
  const auto missing = [](const Item* item) { return std::ssize(item->tokens) - Sequence::Of(*item).pages.Length(); };
  std::vector<Item*> queue;
  for (Item& item : items) {
    // The last draft token is not computed.
    if (std::ssize(item.tokens) + item.count - 1 > setup_.positions) continue;
    KeepAccepted(item);
    if (missing(&item) > 0) queue.push_back(&item);
  }
  // In the order of `items` where as much is missing. std::stable_sort would allocate a buffer.
  std::ranges::sort(queue, {}, [&](const Item* item) { return std::pair(missing(item), item); });
  int64_t rows_left = setup_.max_rows;
  std::vector<Item*> computed;
  for (Item* item : queue) {
    Sequence& sequence = Sequence::Of(*item);
    const int64_t tokens = std::min(missing(item), rows_left);
    if (tokens == 0) break;
    if (!Reserve(sequence, tokens)) continue;
    rows_left -= tokens;
    const bool is_last = tokens == missing(item);
    const auto start = static_cast<size_t>(sequence.pages.Length());
    run_items_.push_back({.tokens = item->tokens.subspan(start, static_cast<size_t>(tokens)),
                          .start = sequence.pages.Length(),
                          .pages = sequence.pages.Pages(),
                          .first_output = is_last ? tokens - 1 : tokens});
    computed.push_back(item);
    if (is_last) active_.push_back({item, &sequence});
  }
  if (run_items_.empty()) return;
  runner_.Forward(run_items_, *backend_);
  for (const Item* item : computed) Sequence::Of(*item).pages.Commit(item->tokens);
}

// Reserves memory, which sequences without a proposal in this step may have to give.
bool DraftModel::Reserve(Sequence& sequence, int64_t tokens) {
  while (!sequence.pages.Reserve(tokens)) {
    Sequence* oldest = nullptr;
    for (Sequence* other : sequences_) {
      if (other->round == round_ || other->pages.Length() == 0) continue;
      if (oldest == nullptr || other->round < oldest->round) oldest = other;
    }
    if (oldest == nullptr) return false;
    oldest->Clear();
  }
  return true;
}

// Samples the next draft token of the active sequences from the logits of the last pass. Those that are complete are
// active no longer.
void DraftModel::SampleActive() {
  if (active_.empty()) return;
  rows_.clear();
  for (size_t i = 0; i < active_.size(); ++i) {
    const auto& [item, sequence] = active_[i];
    rows_.push_back({.item = i, .state = &item->sampler, .drafts = sequence->drafted});
    if (!runner_.SamplesOnDevice()) continue;
    rows_.back().device_params = item->sampler.NextSample(setup_.model->Config().vocab, std::ssize(sequence->drafted));
  }
  runner_.Logits(0, rows_);
  row_sampler_.Run(rows_);
  size_t kept = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    const auto [item, sequence] = active_[i];
    const int32_t token = rows_[i].token;
    if (token < 0) continue;  // invalid logits, or none that is allowed
    sequence->drafted.push_back(token);
    item->draft.push_back(token);
    const bool stops = std::ranges::find(item->stop_tokens, token) != item->stop_tokens.end();
    if (!stops && std::ssize(sequence->drafted) < item->count) active_[kept++] = {item, sequence};
  }
  active_.resize(kept);
}

// Computes the last draft token of the active sequences, stored after their tokens in the open page.
void DraftModel::ForwardActive() {
  run_items_.clear();
  for (const auto& [item, sequence] : active_) {
    const std::span<const int32_t> drafted = sequence->drafted;
    run_items_.push_back({.tokens = drafted.last(1),
                          .start = sequence->pages.Length() + std::ssize(drafted) - 1,
                          .pages = sequence->pages.Pages()});
  }
  runner_.Forward(run_items_, *backend_);
}

}  // namespace kvanta::engine
