// Draft model: a small model with the target's vocabulary proposes what it would itself say. Each draft token is
// sampled with the request's own parameters and random number of its position, so that it is most likely the one that
// verification samples (docs/adr/0057).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/moving_mean.h"
#include "base/thread_pool.h"
#include "cache/kv_cache_manager.h"
#include "engine/draft_control.h"
#include "engine/draft_proposer.h"
#include "models/model.h"
#include "observe/kv_observer.h"
#include "runner/row_sampler.h"
#include "runner/runner.h"

namespace kvanta::engine {

struct DraftModelSetup {
  std::unique_ptr<models::Model> model;
  formats::CacheLayout layout;                // with the target's page size
  std::vector<cache::Visibility> visibility;  // per layer
  std::vector<formats::LayerScales> scales;   // per layer
  observe::BackendFactory make_backend;
  std::shared_ptr<ThreadPool> threads;
  int64_t positions = 0;                     // for which the model was loaded
  int64_t max_rows = 0, max_logit_rows = 0;  // limits of a pass
  bool prefix_caching = true, graphs = false;
};

class DraftModel : public DraftProposer {
 public:
  explicit DraftModel(DraftModelSetup setup);
  ~DraftModel() override;

  std::unique_ptr<State> MakeState(const std::string& salt) override;
  // A sequence whose tokens the draft model has not all seen catches up, by max_rows tokens in all; until it has, and
  // while the cache has no room for it, it gets no draft.
  void Propose(std::span<Item> items) override;
  const cache::KvCacheSpec* CacheSpec() const noexcept override { return &spec_; }
  void ReserveCache(cache::PagePoolConfig pool) override;
  void ResetPrefixCache() override;
  double PassSeconds() const noexcept override { return pass_seconds_.Value(); }
  DraftModelStats Stats() const noexcept override;

 private:
  class Sequence;
  // A sequence that gets one more draft token.
  struct Active {
    Item* item;
    Sequence* sequence;
  };

  void KeepAccepted(Item& item);
  void CatchUp(std::span<Item> items);
  bool Reserve(Sequence& sequence, int64_t tokens);
  void SampleActive();
  void ForwardActive();

  DraftModelSetup setup_;
  cache::KvCacheSpec spec_;
  std::optional<cache::KvCacheManager> cache_;
  std::unique_ptr<attention::Backend> backend_;
  runner::Runner runner_;
  runner::RowSampler row_sampler_;
  std::vector<Sequence*> sequences_;  // all that exist
  int64_t round_ = 0;                 // calls of Propose
  double seconds_ = 0;
  MovingMean pass_seconds_{kCostWeight};
  // A pass; members for their memory.
  std::vector<Active> active_;
  std::vector<runner::RunItem> run_items_;
  std::vector<runner::SampleRow> rows_;
};

}  // namespace kvanta::engine
