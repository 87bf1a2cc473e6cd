// Shadow evaluation of the quantized cache on served texts: for a sample of the finished requests, the divergence of
// the served distribution from an exact cache's, position by position. Both are computed again, chunk by chunk while
// the engine is idle, in two small caches. That gives the served distribution to the bit, since a position's logits do
// not depend on chunks, batches or prefix hits.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "kvanta/stats.h"
#include "observe/kv_observer.h"

namespace kvanta::observe {

// The model and the caches that are compared. References must outlive the monitor.
struct QualitySetup {
  models::Model& model;
  const BackendFactory& make_backend;
  const std::vector<formats::LayerScales>& scales;  // per layer
  const formats::CacheLayout& served;
  formats::CacheLayout exact;
};

class QualityMonitor {
 public:
  static constexpr int64_t kMaxTokens = 2048;  // tokens of a sequence: bounds the two caches
  static constexpr size_t kMaxPending = 16;    // sequences; more are skipped, so that memory stays bounded

  // rate: share of requests, in [0, 1].
  QualityMonitor(QualitySetup setup, double rate);
  ~QualityMonitor();

  // Enqueues a finished request's tokens if its seed samples it, so that the same requests are sampled again. Positions
  // [first, tokens.size()) were generated.
  void Enqueue(std::span<const int32_t> tokens, int64_t first, uint64_t seed) noexcept;
  bool HasWork() const noexcept { return !pending_.empty(); }
  // Computes one chunk of one sequence. An error drops the sequence, which Stats() counts as skipped.
  void Work() noexcept;
  const QualityStats& Stats() const noexcept { return stats_; }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    int64_t first;
  };
  class Pass;
  class Comparison;

  QualitySetup setup_;
  double rate_;
  std::deque<Sequence> pending_;            // the first one is in progress
  std::unique_ptr<Comparison> comparison_;  // comparison of the first one, or null
  QualityStats stats_;
};

}  // namespace kvanta::observe
