#include "runner/logprobs.h"

#include <cmath>

#include "runner/candidates.h"
#include "runner/softmax.h"

namespace kvanta::runner {

std::vector<TokenLogprob> ComputeLogprobs(std::span<const float> logits, int32_t token, int count) {
  const LogitRange range = FindRange(logits);
  if (!range.valid) return {};
  const double log_sum = std::log(SumExp(logits, range.max));
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(range.max) - log_sum);
  };
  const float own = logits[static_cast<size_t>(token)];
  int rank = 1;
  for (size_t i = 0; i < logits.size(); ++i) {
    rank += logits[i] > own || (logits[i] == own && static_cast<int32_t>(i) < token) ? 1 : 0;
  }
  std::vector<TokenLogprob> result{{token, logprob(own), rank}};
  std::vector<Candidate> top;
  SelectTop(logits, count, -INFINITY, top);
  for (size_t i = 0; i < top.size(); ++i) {
    result.push_back({top[i].token, logprob(top[i].logit), static_cast<int>(i) + 1});
  }
  return result;
}

}  // namespace kvanta::runner
