// Multi-token prediction (MTP): the checkpoint's own layer that continues the model's hidden states proposes tokens. It
// reads each step's hidden states right after the step, and keeps K and V of its one layer in a cache of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/draft_model.h"

namespace kvanta::engine {

class MtpProposer : public DraftProposer {
 public:
  // setup.model: models::LoadPredictor's. prefix_caching is not read: a position's K and V come from hidden states,
  // which a prefix hit does not have. A sequence is then known from its first computed token on.
  explicit MtpProposer(DraftModelSetup setup);
  ~MtpProposer() override;

  std::unique_ptr<State> MakeState(const std::string& salt) override;
  bool ReadsHiddenStates() const noexcept override { return true; }
  void OnStep(std::span<const TargetRows> rows) override;
  // Sequences whose last token but one OnStep has not seen get no draft.
  void Propose(std::span<Item> items) override;
  const cache::KvCacheSpec* CacheSpec() const noexcept override { return &spec_; }
  void ReserveCache(cache::PagePoolConfig pool) override;
  double PassSeconds() const noexcept override { return pass_seconds_.Value(); }
  DraftModelStats Stats() const noexcept override;

 private:
  class Sequence;
  // A sequence that gets one more draft token.
  struct Active {
    Item* item;
    Sequence* sequence;
    int64_t limit;  // draft tokens
  };

  bool Reserve(Sequence& sequence, int64_t tokens);
  void SampleActive();
  void ForwardActive();
  void KeepHiddenStates();

  DraftModelSetup setup_;
  cache::KvCacheSpec spec_;
  std::optional<cache::KvCacheManager> cache_;
  std::unique_ptr<attention::Backend> backend_;
  runner::Runner runner_;
  runner::RowSampler row_sampler_;
  std::vector<Sequence*> sequences_;  // all that exist
  int64_t round_ = 0;                 // calls of OnStep
  double seconds_ = 0;
  MovingMean pass_seconds_{kCostWeight};
  // A pass; members for their memory.
  std::vector<Active> active_;
  std::vector<Sequence*> computed_;  // sequences of run_items_
  std::vector<runner::RunItem> run_items_;
  std::vector<runner::SampleRow> rows_;
};

}  // namespace kvanta::engine
