// Draft model: a small model with the target's vocabulary proposes what it would itself say.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "engine/model_proposer.h"

namespace kvanta::engine {

class DraftModel : public ModelProposer {
 public:
  using ModelProposer::ModelProposer;

  std::unique_ptr<State> MakeState(const std::string& salt) override;
  // A sequence whose tokens the draft model has not all seen catches up, by max_rows tokens in all; until it has, and
  // while the cache has no room for it, it gets no draft.
  void Propose(std::span<Item> items) override;

 private:
  void KeepAccepted(Item& item);
  void CatchUp(std::span<Item> items);
  void ForwardActive() override;
};

}  // namespace kvanta::engine
