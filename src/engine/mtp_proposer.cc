#include "engine/mtp_proposer.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "cache/sequence_cache.h"

namespace kvanta::engine {

// Row i of the layer has the token at origin + i + 1 and the model's hidden state at origin + i. Positions count from
// the origin: rotary embeddings depend on their differences alone.
class MtpProposer::Sequence : public DraftProposer::State {
 public:
  explicit Sequence(MtpProposer& owner) : pages(*owner.cache_, "", cache::Sharing::kPrivate), owner_(owner) {
    owner.sequences_.push_back(this);
  }
  ~Sequence() override { std::erase(owner_.sequences_, this); }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  static Sequence& Of(State& state) noexcept { return static_cast<Sequence&>(state); }
  // Position of the model's first hidden state that the layer has not seen.
  int64_t End() const noexcept { return origin + pages.Length(); }
  void Restart(int64_t position) noexcept {
    pages.Clear();
    drafted.clear();
    origin = position;
  }

  cache::SequenceCache pages;       // its length: rows from OnStep
  int64_t origin = 0;               // position of row 0
  std::span<const int32_t> tokens;  // of the request, during OnStep
  std::vector<int32_t> drafted;
  std::vector<float> hidden;  // of the last row, whose logits are those of the next draft token
  int64_t round = 0;          // round of the last row

 private:
  MtpProposer& owner_;
};

MtpProposer::MtpProposer(DraftModelSetup setup)
    : setup_(std::move(setup)),
      spec_(setup_.layout, setup_.visibility),
      runner_(*setup_.model, setup_.max_rows, setup_.max_logit_rows),
      row_sampler_(*setup_.threads) {}

MtpProposer::~MtpProposer() = default;

void MtpProposer::ReserveCache(cache::PagePoolConfig pool) {
  cache_.emplace(setup_.model->ops().device(), setup_.layout, setup_.visibility, pool, /*prefix_caching=*/false);
  backend_ = setup_.make_backend(cache_->pool, {.layers = setup_.model->AttentionLayers(), .scales = setup_.scales});
}

DraftModelStats MtpProposer::Stats() const noexcept {
  return {.seconds = seconds_,
          .weight_bytes = setup_.model->WeightBytes(),
          .cache_used_bytes = cache_->pool.UsedBytes(),
          .cache_budget_bytes = cache_->pool.BudgetBytes()};
}

std::unique_ptr<DraftProposer::State> MtpProposer::MakeState(const std::string& /*salt*/) {
  return std::make_unique<Sequence>(*this);
}

void MtpProposer::OnStep(std::span<const TargetRows> rows) {
  const double start = Now();
  ++round_;
  run_items_.clear();
  computed_.clear();
  for (const TargetRows& each : rows) {
    Sequence& sequence = Sequence::Of(each.state);
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
    for (Sequence* sequence : computed_) sequence->pages.Commit(sequence->tokens);
    KeepHiddenStates();
  } catch (...) {  // no memory: nothing is known of the pass
    for (Sequence* sequence : computed_) sequence->Restart(0);
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

// Reserves memory, which sequences without rows in this step may have to give.
bool MtpProposer::Reserve(Sequence& sequence, int64_t tokens) {
  while (!sequence.pages.Reserve(tokens)) {
    Sequence* oldest = nullptr;
    for (Sequence* other : sequences_) {
      if (other == &sequence || other->round == round_ || other->pages.Length() == 0) continue;
      if (oldest == nullptr || other->round < oldest->round) oldest = other;
    }
    if (oldest == nullptr) return false;
    oldest->Restart(0);
  }
  return true;
}

void MtpProposer::Propose(std::span<Item> items) {
  const double start = Now();
  const int64_t page_size = spec_.page_size;
  active_.clear();
  for (Item& item : items) {
    Sequence& sequence = Sequence::Of(item.state);
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
    runner_.SetHiddenState(static_cast<int64_t>(i), active_[i].sequence->hidden);
  }
  SampleActive();
  while (!active_.empty()) {
    const double pass_start = Now();
    const auto rows = std::ssize(active_);
    ForwardActive();
    SampleActive();
    pass_seconds_.Add((Now() - pass_start) / PassCost(rows));
  }
  seconds_ += Now() - start;
}

// Samples the next draft token of the active sequences, whose hidden states are the runner's output rows. Those that
// are complete are active no longer.
void MtpProposer::SampleActive() {
  if (active_.empty()) return;
  rows_.clear();
  for (size_t i = 0; i < active_.size(); ++i) {
    rows_.push_back({.item = i, .state = &active_[i].item->sampler, .drafts = active_[i].sequence->drafted});
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

// Computes the last draft token of the active sequences, with the hidden state that it was sampled from.
void MtpProposer::ForwardActive() {
  run_items_.clear();
  computed_.clear();
  for (const Active& active : active_) {
    const std::span<const int32_t> drafted = active.sequence->drafted;
    run_items_.push_back({.tokens = drafted.last(1),
                          .start = active.sequence->pages.Length() + std::ssize(drafted) - 1,
                          .pages = active.sequence->pages.Pages(),
                          .hidden = active.sequence->hidden.data()});
    computed_.push_back(active.sequence);
  }
  runner_.Forward(run_items_, *backend_);
  KeepHiddenStates();
}

}  // namespace kvanta::engine
