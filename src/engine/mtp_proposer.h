// Multi-token prediction (MTP): the checkpoint's own layer that continues the model's hidden states proposes tokens. It
// reads each step's hidden states right after the step, and keeps K and V of its one layer in a cache of its own.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/model_proposer.h"

namespace kvanta::engine {

class MtpProposer : public ModelProposer {
 public:
  // setup.model: models::LoadPredictor's. setup.prefix_caching is false: a position's K and V come from hidden states,
  // which a prefix hit does not have. A sequence is known from its first computed token on.
  using ModelProposer::ModelProposer;

  std::unique_ptr<State> MakeState(const std::string& salt) override;
  bool ReadsHiddenStates() const noexcept override { return true; }
  void OnStep(std::span<const TargetRows> rows) override;
  // Sequences whose last token but one OnStep has not seen get no draft.
  void Propose(std::span<Item> items) override;

 private:
  class MtpSequence;

  void ForwardActive() override;
  void KeepHiddenStates();

  std::vector<MtpSequence*> computed_;  // sequences of run_items_; a member for its memory
};

}  // namespace kvanta::engine
