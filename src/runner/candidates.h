// Token ids by descending logit, equal logits by ascending id, without sorting a vocabulary.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace kvanta::runner {

struct Candidate {
  float logit;
  int32_t token;

  // More likely first.
  bool operator<(const Candidate& other) const noexcept {
    return logit > other.logit || (logit == other.logit && token < other.token);
  }
};

// The `count` most likely tokens with logit >= threshold, in order. One pass with a bounded heap: most tokens cost one
// comparison.
inline void SelectTop(std::span<const float> logits, int count, float threshold, std::vector<Candidate>& out) {
  out.clear();
  if (count <= 0) return;
  float lowest = threshold;  // tokens below cannot enter the heap
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] >= lowest)) continue;
    const Candidate candidate{logits[i], static_cast<int32_t>(i)};
    if (static_cast<int>(out.size()) < count) {
      out.push_back(candidate);
      std::push_heap(out.begin(), out.end());
    } else if (candidate < out.front()) {
      std::pop_heap(out.begin(), out.end());
      out.back() = candidate;
      std::push_heap(out.begin(), out.end());
    }
    if (static_cast<int>(out.size()) == count) lowest = std::max(threshold, out.front().logit);
  }
  std::sort_heap(out.begin(), out.end());
}

// All tokens with logit >= threshold, in order.
inline void SelectAbove(std::span<const float> logits, float threshold, std::vector<Candidate>& out) {
  out.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] >= threshold) out.push_back({logits[i], static_cast<int32_t>(i)});
  }
  std::sort(out.begin(), out.end());
}

}  // namespace kvanta::runner
