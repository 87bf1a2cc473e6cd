#include "engine/ngram_proposer.h"

#include <algorithm>
#include <bit>

namespace kvanta::engine {
namespace {

constexpr int kMaxCandidates = 64;  // bounds the time of a lookup
constexpr size_t kMinBuckets = 256;

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

int64_t NgramIndex::Find(std::span<const int32_t> tokens) {
  const auto size = std::ssize(tokens);
  if (size <= min_) return -1;
  if (tokens.size() > heads_.size()) {  // twice as many buckets, and all tokens again
    const size_t buckets = std::max(kMinBuckets, std::bit_ceil(tokens.size()));
    previous_.reserve(buckets);
    previous_.clear();
    heads_.assign(buckets, -1);
  }
  // The n-gram at the very end has no token behind it.
  while (std::ssize(previous_) < size) {
    const auto end = std::ssize(previous_);
    if (end < min_) {
      previous_.push_back(-1);
    } else {
      Insert(tokens, end);
    }
  }
  int64_t best = -1;
  int64_t best_length = min_ - 1;
  int32_t candidate = heads_[BucketBefore(tokens, size)];
  for (int tried = 0; candidate >= 0 && tried < kMaxCandidates && best_length < max_; ++tried) {
    int64_t length = 0;
    while (length < max_ && length < candidate &&
           tokens[static_cast<size_t>(candidate - 1 - length)] == tokens[static_cast<size_t>(size - 1 - length)]) {
      ++length;
    }
    if (length > best_length) {
      best = candidate;
      best_length = length;
    }
    candidate = previous_[static_cast<size_t>(candidate)];
  }
  return best;
}

// Behind the sequence's end, the draft goes on with itself: so it repeats a short period as often as it is long.
void NgramProposer::Propose(State& state, std::span<const int32_t> tokens, int count,
                            std::vector<int32_t>& draft) const {
  const int64_t match = static_cast<NgramIndex&>(state).Find(tokens);
  if (match < 0) return;
  const size_t first = draft.size();
  for (int i = 0; i < count; ++i) {
    const auto source = static_cast<size_t>(match + i);
    draft.push_back(source < tokens.size() ? tokens[source] : draft[first + source - tokens.size()]);
  }
}

}  // namespace kvanta::engine
