#include "engine/ngram_proposer.h"

#include <algorithm>
#include <bit>

namespace kvanta::engine {
namespace {

constexpr int kMaxCandidates = 64;  // bounds the time of a lookup
constexpr size_t kMinBuckets = 256;
constexpr int64_t kLongestMatch = 32;  // beyond, a match says no more about its continuation

// Draft tokens proposed after a match of `match` tokens.
int64_t DraftLength(int64_t match) noexcept {
  return std::max<int64_t>(1, 2 * match - 3);
}

// Equal tokens before both positions, at most `limit`.
int64_t EqualTokens(std::span<const int32_t> tokens, int64_t end, int64_t other_end, int64_t limit) noexcept {
  limit = std::min({limit, end, other_end});
  int64_t length = 0;
  while (length < limit &&
         tokens[static_cast<size_t>(end - 1 - length)] == tokens[static_cast<size_t>(other_end - 1 - length)]) {
    ++length;
  }
  return length;
}

}  // namespace

// Bucket of the min_ tokens before `end`.
size_t NgramIndex::BucketBefore(std::span<const int32_t> tokens, int64_t end) const noexcept {
  uint64_t hash = 0;
  for (const int32_t token : tokens.subspan(static_cast<size_t>(end - min_), static_cast<size_t>(min_))) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 32;
  }
  return static_cast<size_t>(hash) & (heads_.size() - 1);
}

void NgramIndex::Insert(std::span<const int32_t> tokens, int64_t end) noexcept {
  int32_t& head = heads_[BucketBefore(tokens, end)];
  previous_.push_back(head);  // has the capacity
  head = static_cast<int32_t>(end);
}

NgramIndex::Match NgramIndex::Find(std::span<const int32_t> tokens) {
  const auto size = std::ssize(tokens);
  if (size <= min_) return {};
  if (tokens.size() > heads_.size()) {  // twice as many buckets, and all tokens again
    const size_t buckets = std::max(kMinBuckets, std::bit_ceil(tokens.size()));
    previous_.reserve(buckets);
    previous_.clear();
    heads_.assign(buckets, -1);
  }
  // No token follows the n-gram at the very end.
  while (std::ssize(previous_) < size) {
    const auto end = std::ssize(previous_);
    if (end < min_) {
      previous_.push_back(-1);
    } else {
      Insert(tokens, end);
    }
  }
  Match best{.length = min_ - 1};
  int32_t candidate = heads_[BucketBefore(tokens, size)];
  for (int tried = 0; candidate >= 0 && tried < kMaxCandidates && best.length < max_; ++tried) {
    const int64_t length = EqualTokens(tokens, candidate, size, max_);
    if (length > best.length) best = {.end = candidate, .length = length};
    candidate = previous_[static_cast<size_t>(candidate)];
  }
  if (best.length == max_) best.length = EqualTokens(tokens, best.end, size, kLongestMatch);
  return best;
}

// A draft that reaches the end of the sequence continues with its own tokens, so that it repeats a short period until
// it has its length.
void NgramProposer::Propose(std::span<Item> items) {
  for (const auto& [state, tokens, count, sampler, stop_tokens, draft] : items) {
    const NgramIndex::Match match = static_cast<NgramIndex&>(state).Find(tokens);
    if (match.end < 0) continue;
    const size_t first = draft.size();
    const int64_t length = std::min<int64_t>(count, DraftLength(match.length));
    for (int64_t i = 0; i < length; ++i) {
      const auto source = static_cast<size_t>(match.end + i);
      draft.push_back(source < tokens.size() ? tokens[source] : draft[first + source - tokens.size()]);
    }
  }
}

}  // namespace kvanta::engine
