// An engine whose drafts are as good as a test wants.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/components.h"
#include "engine/engine_impl.h"
#include "engine/requests.h"

namespace kvanta::engine {

// Proposes the true continuations of known sequences, each token wrong with some probability.
class ScriptedProposer : public DraftProposer {
 public:
  explicit ScriptedProposer(double error_rate) : error_rate_(error_rate) {}
  void Add(std::vector<int32_t> sequence) { sequences_.push_back(std::move(sequence)); }

  std::unique_ptr<State> MakeState(const std::string& /*salt*/) override { return std::make_unique<State>(); }
  void Propose(std::span<Item> items) override {
    for (const Item& item : items) Propose(item.tokens, item.count, item.draft);
  }

 private:
  void Propose(std::span<const int32_t> tokens, int count, std::vector<int32_t>& draft) {
    for (const std::vector<int32_t>& sequence : sequences_) {
      if (sequence.size() <= tokens.size() || !std::equal(tokens.begin(), tokens.end(), sequence.begin())) continue;
      for (size_t i = tokens.size(); i < sequence.size() && count-- > 0; ++i) {
        const bool wrong = std::uniform_real_distribution<>(0, 1)(random_) < error_rate_;
        draft.push_back(wrong ? (sequence[i] + 1) % 96 : sequence[i]);
      }
      return;
    }
  }

  double error_rate_;
  std::mt19937_64 random_{7};
  std::vector<std::vector<int32_t>> sequences_;
};

struct SpeculatingEngine {
  SpeculatingEngine(EngineComponents components, double error_rate, int tokens = 4) {
    auto scripted = std::make_unique<ScriptedProposer>(error_rate);
    proposer = scripted.get();
    components.proposer = std::move(scripted);
    components.num_speculative_tokens = tokens;
    engine = std::make_unique<Engine::Impl>(std::move(components));
  }
  SpeculatingEngine(const EngineConfig& config, double error_rate, int tokens = 4)
      : SpeculatingEngine(LoadComponents(config), error_rate, tokens) {}
  // Makes the proposer know the request's tokens.
  void Teach(const Request& request, const Collected& plain) const {
    std::vector<int32_t> sequence = request.prompt;
    sequence.insert(sequence.end(), plain.tokens.begin(), plain.tokens.end());
    proposer->Add(std::move(sequence));
  }

  std::unique_ptr<Engine::Impl> engine;
  ScriptedProposer* proposer = nullptr;
};

}  // namespace kvanta::engine
