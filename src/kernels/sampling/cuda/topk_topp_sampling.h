// Top-k and top-p sampling. Include the primitives first.
//
// Equivalent to runner::Sampler on the host: candidates by descending logit, ties by ascending id, probabilities summed
// in doubles in that order, so that both choose the same token (except that the total mass for top_p is summed in
// another order). Rows are not sorted: a threshold search counts, and sums up, the logits above kThresholds thresholds
// per pass, then between two of them, until enough but at most kMaxCandidates logits remain. Those are gathered in
// shared memory and sorted there.
#pragma once

#include "kernels/cuda/row_kernels.h"
#include "kernels/sampling/sorted_candidates.h"

namespace kvanta::kernels::cuda {

inline constexpr int kThresholds = 8;  // per pass
inline constexpr int kMaxPasses = 14;  // each pass divides the range of 2^32 by 7
inline constexpr int kMassesAt = 0;
inline constexpr int kCountsAt = kMassesAt + 8 * kThresholds * kRowWarps;
inline constexpr int kPositionsAt = kCountsAt + 4 * kThresholds * kRowWarps;  // int32 [threads + 1]
inline constexpr int kEntriesAt = kPositionsAt + 4 * kRowThreads + 16;
inline constexpr int kTermsAt = kEntriesAt + 8 * kMaxCandidates;
inline constexpr int kThresholdSearchBytes = kTermsAt + 4 * kMaxCandidates;

// Unsigned integer that orders like x; +0 and -0 are equal.
KVANTA_DEVICE uint32_t OrderedBits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
KVANTA_DEVICE float FromOrderedBits(uint32_t ordered) {
  return std::bit_cast<float>((ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered);
}

struct ThresholdSearch {
  const float* logits;
  int64_t width;
  float max_logit;
  SampleParams params;

  // Thresholds in descending order; number and mass of the logits at or above each: `thread_count` of this thread,
  // `count` and `mass` of the row.
  uint32_t threshold[kThresholds];
  int32_t thread_count[kThresholds];
  int32_t count[kThresholds];
  double mass[kThresholds];

  KVANTA_DEVICE float Term(float logit) const { return ExpOfNegative((logit - max_logit) * params.scale); }

  // One pass over the row: computes thread_count, count and mass.
  KVANTA_DEVICE void SumProbs() {
    KVANTA_UNROLL
    for (int i = 0; i < kThresholds; ++i) {
      thread_count[i] = 0;
      mass[i] = 0;
    }
    for (int64_t token = ThreadIndex(); token < width; token += kRowThreads) {
      const float logit = logits[token];
      const uint32_t ordered = OrderedBits(logit);
      if (ordered < threshold[kThresholds - 1]) continue;
      const double term = params.top_k > 0 ? 0.0 : static_cast<double>(Term(logit));
      KVANTA_UNROLL
      for (int i = 0; i < kThresholds; ++i) {
        if (ordered < threshold[i]) continue;
        ++thread_count[i];
        mass[i] += term;
      }
    }
    const int warp = ThreadIndex() / kWarp;
    SyncBlock();  // the previous pass's sums have been read
    KVANTA_UNROLL
    for (int i = 0; i < kThresholds; ++i) {
      count[i] = thread_count[i];
      for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        count[i] += ShuffleXor(count[i], mask);
        mass[i] += ShuffleXor(mass[i], mask);
      }
      if (ThreadIndex() % kWarp == 0) {
        StoreShared(kCountsAt + 4 * (warp * kThresholds + i), count[i]);
        StoreShared(kMassesAt + 8 * (warp * kThresholds + i), mass[i]);
      }
    }
    SyncBlock();
    KVANTA_UNROLL
    for (int i = 0; i < kThresholds; ++i) {
      count[i] = 0;
      mass[i] = 0;
      for (int other = 0; other < kRowWarps; ++other) {
        count[i] += LoadShared<int32_t>(kCountsAt + 4 * (other * kThresholds + i));
        mass[i] += LoadShared<double>(kMassesAt + 8 * (other * kThresholds + i));
      }
    }
  }

  // Gathers logits at or above `from` in shared memory, sorted by descending logit, then ascending id. `own`: number
  // found by this thread.
  KVANTA_DEVICE void Gather(uint32_t from, int32_t own, int32_t all) const {
    StoreShared(kPositionsAt + 4 * ThreadIndex(), own);
    SyncBlock();
    if (ThreadIndex() == 0) {
      int32_t before = 0;
      for (int i = 0; i < kRowThreads; ++i) {
        const auto more = LoadShared<int32_t>(kPositionsAt + 4 * i);
        StoreShared(kPositionsAt + 4 * i, before);
        before += more;
      }
    }
    SyncBlock();
    auto position = LoadShared<int32_t>(kPositionsAt + 4 * ThreadIndex());
    for (int64_t token = ThreadIndex(); token < width; token += kRowThreads) {
      const uint32_t ordered = OrderedBits(logits[token]);
      if (ordered < from) continue;
      StoreShared(kEntriesAt + 8 * position++,
                  (uint64_t{ordered} << 32U) | (0xFFFFFFFFU - static_cast<uint32_t>(token)));
    }
    int size = 1;
    while (size < all) size *= 2;
    for (int i = all + ThreadIndex(); i < size; i += kRowThreads) StoreShared(kEntriesAt + 8 * i, uint64_t{0});
    SyncBlock();
    // Bitonic sort, descending.
    for (int length = 2; length <= size; length *= 2) {
      for (int distance = length / 2; distance > 0; distance /= 2) {
        for (int pair = ThreadIndex(); pair < size / 2; pair += kRowThreads) {
          const int low = pair / distance * (2 * distance) + pair % distance;
          const auto a = LoadShared<uint64_t>(kEntriesAt + 8 * low);
          const auto b = LoadShared<uint64_t>(kEntriesAt + 8 * (low + distance));
          if ((a < b) != ((low & length) == 0)) continue;
          StoreShared(kEntriesAt + 8 * low, b);
          StoreShared(kEntriesAt + 8 * (low + distance), a);
        }
        SyncBlock();
      }
    }
    for (int i = ThreadIndex(); i < all; i += kRowThreads) {
      const auto ordered = static_cast<uint32_t>(LoadShared<uint64_t>(kEntriesAt + 8 * i) >> 32U);
      StoreShared(kTermsAt + 4 * i, Term(FromOrderedBits(ordered)));
    }
    SyncBlock();
  }
};

// Called by all threads; thread 0 returns the token, or -1 for too many candidates.
KVANTA_DEVICE int32_t SampleAboveThreshold(const float* logits, int64_t width, float max_logit,
                                           const SampleParams& params) {
  const uint32_t min_threshold = OrderedBits(max_logit + params.min_logit_offset);
  ThresholdSearch search;
  search.logits = logits;
  search.width = width;
  search.max_logit = max_logit;
  search.params = params;
  // Initial distances from the maximum: in temperatures for top_p, in logits for top_k.
  constexpr float kDistances[kThresholds - 1] = {1, 2.5F, 4.5F, 7, 10, 14, 22};
  const float unit = params.top_k > 0 ? 1.0F : 1.0F / params.scale;
  KVANTA_UNROLL
  for (int i = 0; i < kThresholds; ++i) {
    const uint32_t threshold =
        i == kThresholds - 1 ? min_threshold : OrderedBits(max_logit - kDistances[i % (kThresholds - 1)] * unit);
    search.threshold[i] = threshold < min_threshold ? min_threshold : threshold;
  }
  double min_mass = 0;
  for (int pass = 0; pass < kMaxPasses; ++pass) {
    search.SumProbs();
    // The margin covers rounding differences of the same sum in another order.
    if (pass == 0) min_mass = static_cast<double>(params.top_p) * search.mass[kThresholds - 1];
    const double sufficient = min_mass * (1 + 1e-12);
    uint32_t upper = 0;  // lowest threshold with too few logits, or the maximum
    uint32_t lower = 0;  // highest threshold with enough logits
    int32_t all = 0;     // logits at or above `lower`
    int32_t own = 0;     // this thread's part of these
    KVANTA_UNROLL
    for (int i = kThresholds - 1; i >= 0; --i) {
      const bool reached = params.top_k > 0 ? search.count[i] >= params.top_k : search.mass[i] >= sufficient;
      if (!reached && search.threshold[i] != min_threshold) continue;
      lower = search.threshold[i];
      all = search.count[i];
      own = search.thread_count[i];
      upper = i > 0 ? search.threshold[i > 0 ? i - 1 : 0] : OrderedBits(max_logit);
    }
    if (all <= kMaxCandidates) {
      search.Gather(lower, own, all);
      if (ThreadIndex() != 0) return -1;
      int32_t count = all;
      const auto prob = [](int32_t i) { return LoadShared<float>(kTermsAt + 4 * i); };
      if (params.top_k > 0) {
        if (count > params.top_k) count = params.top_k;
        if (params.top_p < 1) min_mass = static_cast<double>(params.top_p) * HeadOfMass(prob, count, kAnyMass).mass;
      }
      const CandidateHead nucleus = HeadOfMass(prob, count, params.top_p < 1 ? min_mass : kAnyMass);
      const int32_t chosen = PickCandidate(prob, nucleus, params.uniform);
      return static_cast<int32_t>(0xFFFFFFFFU - static_cast<uint32_t>(LoadShared<uint64_t>(kEntriesAt + 8 * chosen)));
    }
    if (upper <= lower) return -1;  // too many equal logits
    const uint32_t between = upper - lower;
    if (pass > 0 && between == 1) return -1;
    KVANTA_UNROLL
    for (uint32_t i = 0; i < kThresholds; ++i) {
      search.threshold[i] = upper - static_cast<uint32_t>(uint64_t{between} * i / (kThresholds - 1));
    }
  }
  return -1;
}

}  // namespace kvanta::kernels::cuda
