#include "runner/logprobs.h"

#include <algorithm>
#include <cmath>

#include "runner/candidates.h"
#include "runner/softmax.h"

namespace kvanta::runner {
namespace {

// The rank of each of `tokens`, 1 for the most likely one. One pass for all: most logits are below every token's.
std::vector<int> Ranks(std::span<const float> logits, std::span<const int32_t> tokens) {
  std::vector<Candidate> sorted;
  for (const int32_t token : tokens) sorted.push_back({logits[static_cast<size_t>(token)], token});
  std::sort(sorted.begin(), sorted.end());
  std::vector<int> before(sorted.size());  // more likely tokens than sorted[i], without those before sorted[i - 1]
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] < sorted.back().logit) continue;
    const auto place = std::upper_bound(sorted.begin(), sorted.end(), Candidate{logits[i], static_cast<int32_t>(i)});
    if (place != sorted.end()) ++before[static_cast<size_t>(place - sorted.begin())];
  }
  for (size_t i = 1; i < before.size(); ++i) before[i] += before[i - 1];
  std::vector<int> ranks;
  for (const int32_t token : tokens) {
    const auto place =
        std::lower_bound(sorted.begin(), sorted.end(), Candidate{logits[static_cast<size_t>(token)], token});
    ranks.push_back(before[static_cast<size_t>(place - sorted.begin())] + 1);
  }
  return ranks;
}

}  // namespace

std::vector<TokenLogprob> ComputeLogprobs(std::span<const float> logits, int32_t token, int count,
                                          std::span<const int32_t> tokens) {
  const LogitRange range = FindRange(logits);
  if (!range.valid) return {};
  const double log_sum = std::log(SumExp(logits, range.max));
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(range.max) - log_sum);
  };
  std::vector<int32_t> ranked{token};
  ranked.insert(ranked.end(), tokens.begin(), tokens.end());
  const std::vector<int> ranks = Ranks(logits, ranked);
  const auto entry = [&](size_t i) -> TokenLogprob {
    return {ranked[i], logprob(logits[static_cast<size_t>(ranked[i])]), ranks[i]};
  };
  std::vector<TokenLogprob> result{entry(0)};
  std::vector<Candidate> top;
  SelectTop(logits, count, -INFINITY, top);
  for (size_t i = 0; i < top.size(); ++i) {
    result.push_back({top[i].token, logprob(top[i].logit), static_cast<int>(i) + 1});
  }
  for (size_t i = 1; i < ranked.size(); ++i) result.push_back(entry(i));
  return result;
}

}  // namespace kvanta::runner
