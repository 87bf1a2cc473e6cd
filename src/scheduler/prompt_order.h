// The order in which prompts share steps: by priority, then the shortest that remains, then arrival. A prompt that
// waits grows shorter in this order, so that none waits for ever: after max_delay, it comes before all that are
// younger, and at least half of the time that prompts have goes to the oldest. Compare shortest remaining processing
// time with ageing.
//
// With `fair`, users come before lengths: first the one who has had the fewest tokens (virtual token counters,
// "Fairness in Serving Large Language Models", OSDI'24).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "scheduler/sequence.h"

namespace kvanta::scheduler {

struct PromptOrderConfig {
  bool shortest_first = true;  // false: in order of arrival
  // Seconds that a prompt may wait for shorter ones; 0: four times what it takes alone.
  double max_delay = 0;
  bool fair = false;
};

class PromptOrder {
 public:
  explicit PromptOrder(const PromptOrderConfig& config) : config_(config) {}

  // The sequence waits from now on, and does no more.
  void Add(const Sequence& sequence);
  void Remove(const Sequence& sequence) noexcept;

  // Starts a step over `prompts`, at `now`, in which a token of a prompt takes `token_seconds` (0: not known). Without
  // a clock, lengths do not count.
  void Begin(std::span<Sequence* const> prompts, std::optional<double> now, double token_seconds) noexcept;
  // True if a comes before b.
  bool Before(const Sequence& a, const Sequence& b) const noexcept;
  // The step computes so many tokens of a sequence, in `seconds`. Counts them for its user.
  void Charge(const Sequence& sequence, int64_t tokens, double seconds, bool is_prompt) noexcept;
  // Users that are remembered: those with a sequence, and some of those who have had more than these.
  int64_t Users() const noexcept { return static_cast<int64_t>(users_.size()); }

 private:
  struct User {
    double served = 0;      // tokens, generated ones weighted
    int64_t sequences = 0;  // unfinished
  };

  // Tokens that remain, less than those by as much as the sequence has waited.
  double Length(const Sequence& sequence) const noexcept;
  double Served(const Sequence& sequence) const noexcept;

  PromptOrderConfig config_;
  std::unordered_map<std::string, User> users_;
  const Sequence* oldest_ = nullptr;  // of the step
  bool by_length_ = false;
  double now_ = 0, token_seconds_ = 0;
  double overtaken_ = 0;  // seconds that others had while the oldest prompt could have run, less those that it had
};

}  // namespace kvanta::scheduler
