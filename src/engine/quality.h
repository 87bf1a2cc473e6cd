// What the quantized cache does to the texts that were really served: for some of the finished requests, the divergence
// of the served distribution from that of an exact cache, position by position. Both are computed again, chunk by chunk
// while the engine has nothing else to do, in two small caches of their own. That is the served distribution to the
// bit, for a position's logits do not depend on chunks, batches or prefix hits.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/components.h"
#include "kvanta/engine.h"

namespace kvanta::engine {

class QualityMonitor {
 public:
  static constexpr int64_t kMaxTokens = 2048;  // of a sequence: bounds the two caches
  static constexpr size_t kMaxPending = 16;    // sequences; more are not taken, so that memory stays bounded

  // rate: share of requests, in [0, 1]. The parts must outlive it.
  QualityMonitor(const EngineComponents& components, double rate);
  ~QualityMonitor();

  // A request has ended: taken or not by its seed, so that the same requests are taken again. Positions
  // [first, tokens.size()) were generated.
  void Offer(std::span<const int32_t> tokens, int64_t first, uint64_t seed);
  bool HasWork() const noexcept { return !pending_.empty(); }
  // Computes one chunk of one sequence. An error drops the sequence; it is in Stats().
  void Work() noexcept;
  const QualityStats& Stats() const noexcept { return stats_; }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    int64_t first;
  };
  class Pass;
  class Comparison;

  const EngineComponents& components_;
  double rate_;
  std::deque<Sequence> pending_;            // the first one is being worked on
  std::unique_ptr<Comparison> comparison_;  // of the first one, or null
  QualityStats stats_;
};

}  // namespace kvanta::engine
