// A token drawn from a row's head: the top_k most likely, those that have top_p of the mass, or both. A unit that
// includes this has included the primitives.
//
// As runner::Sampler does it on the host: candidates by descending logit, equal logits by ascending id, masses in
// doubles and in that order, so that the same token comes out. (But for the mass of all, of which top_p takes its
// share: its sum has an order of its own.) A row is not sorted: a bar is looked for that enough candidates reach, and
// not too many, by counting and weighing what reaches each of a few bars in one pass, then between two of these. What
// reaches it is gathered in shared memory and sorted there.
#pragma once

#include "kernels/cuda/row_kernels.h"
#include "kernels/sampling/sorted_candidates.h"

namespace kvanta::kernels::cuda {

inline constexpr int kBars = 8;     // of a pass
inline constexpr int kPasses = 14;  // find any bar: each leaves a seventh of 2^32
inline constexpr int kMassesAt = 0;
inline constexpr int kCountsAt = kMassesAt + 8 * kBars * kRowWarps;
inline constexpr int kPlacesAt = kCountsAt + 4 * kBars * kRowWarps;  // int32 [threads + 1]
inline constexpr int kEntriesAt = kPlacesAt + 4 * kRowThreads + 16;
inline constexpr int kTermsAt = kEntriesAt + 8 * kMaxCandidates;
inline constexpr int kCutBytes = kTermsAt + 4 * kMaxCandidates;

// Ordered as the numbers are; zeros are one.
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
  float max_value;
  SampleParams draw;

  // Bars, the highest first, and what reaches them: `own` of this thread, `count` and `mass` of all.
  uint32_t bar[kBars];
  int32_t own[kBars];
  int32_t count[kBars];
  double mass[kBars];

  KVANTA_DEVICE float Term(float logit) const { return ExpOfNegative((logit - max_value) * draw.scale); }

  // One pass over the row.
  KVANTA_DEVICE void SumProbs() {
    KVANTA_UNROLL
    for (int i = 0; i < kBars; ++i) {
      own[i] = 0;
      mass[i] = 0;
    }
    for (int64_t token = ThreadIndex(); token < width; token += kRowThreads) {
      const float logit = logits[token];
      const uint32_t ordered = OrderedBits(logit);
      if (ordered < bar[kBars - 1]) continue;
      const double term = draw.top_k > 0 ? 0.0 : static_cast<double>(Term(logit));
      KVANTA_UNROLL
      for (int i = 0; i < kBars; ++i) {
        if (ordered < bar[i]) continue;
        ++own[i];
        mass[i] += term;
      }
    }
    const int warp = ThreadIndex() / kWarp;
    SyncBlock();  // the sums of an earlier pass have been read
    KVANTA_UNROLL
    for (int i = 0; i < kBars; ++i) {
      count[i] = own[i];
      for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        count[i] += ShuffleXor(count[i], mask);
        mass[i] += ShuffleXor(mass[i], mask);
      }
      if (ThreadIndex() % kWarp == 0) {
        StoreShared(kCountsAt + 4 * (warp * kBars + i), count[i]);
        StoreShared(kMassesAt + 8 * (warp * kBars + i), mass[i]);
      }
    }
    SyncBlock();
    KVANTA_UNROLL
    for (int i = 0; i < kBars; ++i) {
      count[i] = 0;
      mass[i] = 0;
      for (int other = 0; other < kRowWarps; ++other) {
        count[i] += LoadShared<int32_t>(kCountsAt + 4 * (other * kBars + i));
        mass[i] += LoadShared<double>(kMassesAt + 8 * (other * kBars + i));
      }
    }
  }

  // Puts what reaches `from` into shared memory, by descending logit, then ascending id. `own_count`: of this thread.
  KVANTA_DEVICE void Gather(uint32_t from, int32_t own_count, int32_t all) const {
    StoreShared(kPlacesAt + 4 * ThreadIndex(), own_count);
    SyncBlock();
    if (ThreadIndex() == 0) {
      int32_t before = 0;
      for (int i = 0; i < kRowThreads; ++i) {
        const auto more = LoadShared<int32_t>(kPlacesAt + 4 * i);
        StoreShared(kPlacesAt + 4 * i, before);
        before += more;
      }
    }
    SyncBlock();
    auto place = LoadShared<int32_t>(kPlacesAt + 4 * ThreadIndex());
    for (int64_t token = ThreadIndex(); token < width; token += kRowThreads) {
      const uint32_t ordered = OrderedBits(logits[token]);
      if (ordered < from) continue;
      StoreShared(kEntriesAt + 8 * place++, (uint64_t{ordered} << 32U) | (0xFFFFFFFFU - static_cast<uint32_t>(token)));
    }
    int size = 1;
    while (size < all) size *= 2;
    for (int i = all + ThreadIndex(); i < size; i += kRowThreads) StoreShared(kEntriesAt + 8 * i, uint64_t{0});
    SyncBlock();
    // A bitonic network: the greatest first.
    for (int run = 2; run <= size; run *= 2) {
      for (int apart = run / 2; apart > 0; apart /= 2) {
        for (int pair = ThreadIndex(); pair < size / 2; pair += kRowThreads) {
          const int low = pair / apart * (2 * apart) + pair % apart;
          const auto a = LoadShared<uint64_t>(kEntriesAt + 8 * low);
          const auto b = LoadShared<uint64_t>(kEntriesAt + 8 * (low + apart));
          if ((a < b) != ((low & run) == 0)) continue;
          StoreShared(kEntriesAt + 8 * low, b);
          StoreShared(kEntriesAt + 8 * (low + apart), a);
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

// By all threads; the first one's result counts. -1: too many candidates.
KVANTA_DEVICE int32_t SampleAboveThreshold(const float* logits, int64_t width, float max_value,
                                           const SampleParams& draw) {
  const uint32_t floor = OrderedBits(max_value + draw.min_logit_offset);
  ThresholdSearch cut;
  cut.logits = logits;
  cut.width = width;
  cut.max_value = max_value;
  cut.draw = draw;
  // Depths that the head of most rows ends between: in temperatures where masses are looked for, as logits else.
  constexpr float kDepths[kBars - 1] = {1, 2.5F, 4.5F, 7, 10, 14, 22};
  const float unit = draw.top_k > 0 ? 1.0F : 1.0F / draw.scale;
  KVANTA_UNROLL
  for (int i = 0; i < kBars; ++i) {
    const uint32_t bar = i == kBars - 1 ? floor : OrderedBits(max_value - kDepths[i % (kBars - 1)] * unit);
    cut.bar[i] = bar < floor ? floor : bar;
  }
  double requested = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    cut.SumProbs();
    // Above what rounding can make of the same sum in another order.
    if (pass == 0) requested = static_cast<double>(draw.top_p) * cut.mass[kBars - 1];
    const double surely = requested * (1 + 1e-12);
    uint32_t above = 0;   // a bar that too few reach, or the peak
    uint32_t enough = 0;  // the highest that enough do
    int32_t all = 0;
    int32_t own = 0;
    KVANTA_UNROLL
    for (int i = kBars - 1; i >= 0; --i) {
      const bool reached = draw.top_k > 0 ? cut.count[i] >= draw.top_k : cut.mass[i] >= surely;
      if (!reached && cut.bar[i] != floor) continue;
      enough = cut.bar[i];
      all = cut.count[i];
      own = cut.own[i];
      above = i > 0 ? cut.bar[i > 0 ? i - 1 : 0] : OrderedBits(max_value);
    }
    if (all <= kMaxCandidates) {
      cut.Gather(enough, own, all);
      if (ThreadIndex() != 0) return -1;
      const auto prob = [](int32_t i) { return LoadShared<float>(kTermsAt + 4 * i); };
      int32_t count = all;
      if (draw.top_k > 0) {
        if (count > draw.top_k) count = draw.top_k;
        if (draw.top_p < 1) requested = static_cast<double>(draw.top_p) * HeadOfMass(prob, count, kAnyMass).mass;
      }
      const CandidateHead head = HeadOfMass(prob, count, draw.top_p < 1 ? requested : kAnyMass);
      const int32_t chosen = PickCandidate(prob, head, draw.uniform);
      return static_cast<int32_t>(0xFFFFFFFFU - static_cast<uint32_t>(LoadShared<uint64_t>(kEntriesAt + 8 * chosen)));
    }
    if (above <= enough) return -1;  // so many are equal
    const uint32_t between = above - enough;
    if (pass > 0 && between == 1) return -1;
    KVANTA_UNROLL
    for (uint32_t i = 0; i < kBars; ++i) {
      cut.bar[i] = above - static_cast<uint32_t>(uint64_t{between} * i / (kBars - 1));
    }
  }
  return -1;
}

}  // namespace kvanta::kernels::cuda
