#include "engine/draft_model.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace kvanta::engine {

std::unique_ptr<DraftProposer::State> DraftModel::MakeState(const std::string& salt) {
  return std::make_unique<Sequence>(*this, salt, cache::Sharing::kShared);
}

void DraftModel::Propose(std::span<Item> items) {
  const double start = Now();
  ++round_;
  try {
    CatchUp(items);
    DraftActive();
  } catch (...) {  // no memory: nothing is known of the last pass
    for (const Item& item : items) Sequence::Of(item.state).Clear();
    throw;
  }
  seconds_ += Now() - start;
}

// Commits the tokens of the last draft that became tokens of the request.
void DraftModel::KeepAccepted(Item& item) {
  Sequence& sequence = Sequence::Of(item.state);
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
  const auto missing = [](const Item* item) {
    return std::ssize(item->tokens) - Sequence::Of(item->state).pages.Length();
  };
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
    Sequence& sequence = Sequence::Of(item->state);
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
    if (is_last) active_.push_back({item, &sequence, item->count});
  }
  if (run_items_.empty()) return;
  runner_.Forward(run_items_, *backend_);
  for (const Item* item : computed) Sequence::Of(item->state).pages.Commit(item->tokens);
}

// Computes the last draft token of the active sequences, stored after their tokens in the open page.
void DraftModel::ForwardActive() {
  run_items_.clear();
  for (const auto& [item, sequence, limit] : active_) {
    const std::span<const int32_t> drafted = sequence->drafted;
    run_items_.push_back({.tokens = drafted.last(1),
                          .start = sequence->pages.Length() + std::ssize(drafted) - 1,
                          .pages = sequence->pages.Pages()});
  }
  runner_.Forward(run_items_, *backend_);
}

}  // namespace kvanta::engine
