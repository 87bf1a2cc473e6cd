// Base of proposers that run a model: its cache, which sequences may have to give up, and passes that sample a draft
// token of every active sequence. Each is sampled with the request's own parameters and random number of its position,
// so that it is most likely the one that verification samples (docs/adr/0057).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/moving_mean.h"
#include "base/thread_pool.h"
#include "cache/kv_cache_manager.h"
#include "cache/sequence_cache.h"
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
  bool prefix_caching = true;
  runner::Graphs graphs = runner::Graphs::kNone;
};

class ModelProposer : public DraftProposer {
 public:
  explicit ModelProposer(DraftModelSetup setup);

  const cache::KvCacheSpec* CacheSpec() const noexcept override { return &spec_; }
  void ReserveCache(cache::PagePoolConfig pool) override;
  void ResetPrefixCache() override;
  double PassSeconds() const noexcept override { return pass_seconds_.Value(); }
  DraftModelStats Stats() const noexcept override;

 protected:
  class Sequence : public State {
   public:
    Sequence(ModelProposer& owner, const std::string& salt, cache::Sharing sharing);
    ~Sequence() override;
    Sequence(const Sequence&) = delete;
    Sequence& operator=(const Sequence&) = delete;

    static Sequence& Of(State& state) noexcept { return static_cast<Sequence&>(state); }
    // Gives up its memory.
    virtual void Clear() noexcept;

    cache::SequenceCache pages;    // without the rows of drafts, which follow its own in the open page
    std::vector<int32_t> drafted;  // last draft; K and V of all but the last token are computed
    int64_t round = 0;             // round in which the sequence was used last

   private:
    ModelProposer& owner_;
  };
  // A sequence that gets one more draft token.
  struct Active {
    Item* item;
    Sequence* sequence;
    int64_t limit;  // draft tokens
  };

  // Reserves memory, which sequences that are not used in this round may have to give.
  bool Reserve(Sequence& sequence, int64_t tokens);
  // Samples draft tokens of the active sequences, the first ones from the runner's output rows, until none is active.
  void DraftActive();
  // Computes the last draft token of the active sequences.
  virtual void ForwardActive() = 0;

  DraftModelSetup setup_;
  cache::KvCacheSpec spec_;
  std::optional<cache::KvCacheManager> cache_;
  std::unique_ptr<attention::Backend> backend_;
  runner::Runner runner_;
  int64_t round_ = 0;
  double seconds_ = 0;
  // A pass; members for their memory.
  std::vector<Active> active_;
  std::vector<runner::RunItem> run_items_;

 private:
  void SampleActive();

  runner::RowSampler row_sampler_;
  std::vector<Sequence*> sequences_;  // all that exist
  MovingMean pass_seconds_{kCostWeight};
  std::vector<runner::SampleRow> rows_;
};

}  // namespace kvanta::engine
