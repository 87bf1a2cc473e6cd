#include "engine/mtp_proposer.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace kvanta::engine {

// Row i of the layer has the token at origin + i + 1 and the model's hidden state at origin + i. Positions count from
// the origin: rotary embeddings depend on their differences alone.
class MtpProposer::MtpSequence : public Sequence {
 public:
  explicit MtpSequence(MtpProposer& owner) : Sequence(owner, "", cache::Sharing::kPrivate) {}

  static MtpSequence& Of(State& state) noexcept { return static_cast<MtpSequence&>(state); }
  // Position of the model's first hidden state that the layer has not seen.
  int64_t End() const noexcept { return origin + pages.Length(); }
  void Restart(int64_t position) noexcept {
    Sequence::Clear();
    origin = position;
  }
  void Clear() noexcept override { Restart(0); }

  int64_t origin = 0;               // position of row 0; `pages` has rows from OnStep
  std::span<const int32_t> tokens;  // of the request, during OnStep
  std::vector<float> hidden;        // of the last row, whose logits are those of the next draft token
};

std::unique_ptr<DraftProposer::State> MtpProposer::MakeState(const std::string& /*salt*/) {
  return std::make_unique<MtpSequence>(*this);
}

void MtpProposer::OnStep(std::span<const TargetRows> rows) {
  const double start = Now();
  ++round_;
  run_items_.clear();
  computed_.clear();
  for (const TargetRows& each : rows) {
    MtpSequence& sequence = MtpSequence::Of(each.state);
    // Rows may be computed again after a preemption, and are missing after a prefix hit.
    if (each.start > sequence.End() || sequence.pages.Length() == 0) sequence.Restart(each.start);
    const int64_t known = sequence.End() - each.start, count = each.count - known;
    if (count <= 0) continue;
    sequence.drafted.clear();
    sequence.hidden.clear();
    if (sequence.pages.Length() + count > setup_.positions || !Reserve(sequence, count)) {
      sequence.Restart(each.start + each.count);
      continue;
    }
    sequence.round = round_;
    sequence.tokens = each.tokens;
    run_items_.push_back(
        {.tokens = each.tokens.subspan(static_cast<size_t>(sequence.End() + 1), static_cast<size_t>(count)),
         .start = sequence.pages.Length(),
         .pages = sequence.pages.Pages(),
         .first_output = count - 1,
         .hidden = each.hidden + known * setup_.model->Config().hidden});
    computed_.push_back(&sequence);
  }
  if (run_items_.empty()) return;
  try {
    runner_.Forward(run_items_, *backend_);
    for (MtpSequence* sequence : computed_) sequence->pages.Commit(sequence->tokens);
    KeepHiddenStates();
  } catch (...) {  // no memory: nothing is known of the pass
    for (MtpSequence* sequence : computed_) sequence->Restart(0);
    throw;
  }
  seconds_ += Now() - start;
}

// Keeps the output rows of the last pass, one of each sequence.
void MtpProposer::KeepHiddenStates() {
  for (size_t i = 0; i < computed_.size(); ++i) {
    const std::span<const float> hidden = runner_.HiddenStates(static_cast<int64_t>(i), 1);
    computed_[i]->hidden.assign(hidden.begin(), hidden.end());
  }
}

void MtpProposer::Propose(std::span<Item> items) {
  const double start = Now();
  const int64_t page_size = spec_.page_size;
  active_.clear();
  for (Item& item : items) {
    MtpSequence& sequence = MtpSequence::Of(item.state);
    sequence.drafted.clear();
    if (sequence.hidden.empty() || sequence.End() + 1 != std::ssize(item.tokens)) continue;
    // Rows of drafts lie in the open page, which must stay open. The first draft token needs none, but that of the last
    // token; nor does the last one.
    const int64_t filled = sequence.pages.Length() % page_size;
    const int64_t rows = filled == 0 ? 0 : page_size - filled - 1;
    const int64_t positions = setup_.positions - sequence.pages.Length();
    active_.push_back({&item, &sequence, std::min<int64_t>(item.count, std::min(rows, positions) + 1)});
  }
  for (size_t i = 0; i < active_.size(); ++i) {
    runner_.SetHiddenState(static_cast<int64_t>(i), static_cast<MtpSequence*>(active_[i].sequence)->hidden);
  }
  DraftActive();
  seconds_ += Now() - start;
}

// Computes the last draft token of the active sequences, with the hidden state that it was sampled from.
void MtpProposer::ForwardActive() {
  run_items_.clear();
  computed_.clear();
  for (const Active& active : active_) {
    auto* const sequence = static_cast<MtpSequence*>(active.sequence);
    const std::span<const int32_t> drafted = sequence->drafted;
    run_items_.push_back({.tokens = drafted.last(1),
                          .start = sequence->pages.Length() + std::ssize(drafted) - 1,
                          .pages = sequence->pages.Pages(),
                          .hidden = sequence->hidden.data()});
    computed_.push_back(sequence);
  }
  runner_.Forward(run_items_, *backend_);
  KeepHiddenStates();
}

}  // namespace kvanta::engine
