#include "runner/logprobs.h"

#include <cmath>

#include "runner/candidates.h"
#include "runner/softmax.h"

namespace kvanta::runner {

std::vector<TokenLogprob> ComputeLogprobs(std::span<const float> logits, int32_t token, int count,
                                          std::span<const int32_t> tokens) {
  const LogitRange range = FindRange(logits);
  if (!range.valid) return {};
  const double log_sum = std::log(SumExp(logits, range.max));
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(range.max) - log_sum);
  };
  const auto entry = [&](int32_t of) -> TokenLogprob {
    const float own = logits[static_cast<size_t>(of)];
    int rank = 1;
    for (size_t i = 0; i < logits.size(); ++i) {
      rank += logits[i] > own || (logits[i] == own && static_cast<int32_t>(i) < of) ? 1 : 0;
    }
    return {of, logprob(own), rank};
  };
  std::vector<TokenLogprob> result{entry(token)};
  std::vector<Candidate> top;
  SelectTop(logits, count, -INFINITY, top);
  for (size_t i = 0; i < top.size(); ++i) {
    result.push_back({top[i].token, logprob(top[i].logit), static_cast<int>(i) + 1});
  }
  for (const int32_t other : tokens) result.push_back(entry(other));
  return result;
}

}  // namespace kvanta::runner
