#include "observe/quality.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "cache/sequence_cache.h"
#include "runner/divergence.h"
#include "runner/philox.h"
#include "runner/runner.h"

namespace kvanta::observe {
namespace {

constexpr int64_t kLogitRows = 16;              // at once
constexpr uint64_t kSampleIndex = 1ULL << 63U;  // in the seed's random numbers; no token has it

}  // namespace

// Forward of one sequence through a cache of its own.
class QualityMonitor::Pass {
 public:
  Pass(const QualitySetup& setup, const formats::CacheLayout& layout, int64_t tokens, int64_t chunk)
      : layout_(layout),
        cache_(setup.model.ops().device(), layout_, {},
               {.budget_bytes = cache::KvCacheSpec(layout_).MinCacheBytes(tokens, 2), .poison_unused = false}, false),
        pages_(cache_, ""),
        backend_(setup.make_backend(cache_.pool, {.layers = setup.model.AttentionLayers(), .scales = setup.scales})),
        runner_(setup.model, chunk, kLogitRows) {}

  int64_t Length() const noexcept { return pages_.Length(); }
  // Forwards the next `rows` tokens; those from first_output on have logits.
  void Forward(std::span<const int32_t> tokens, int64_t rows, int64_t first_output) {
    if (!pages_.Reserve(rows)) throw std::bad_alloc();
    const auto start = static_cast<size_t>(pages_.Length());
    const runner::RunItem item{.tokens = tokens.subspan(start, static_cast<size_t>(rows)),
                               .start = pages_.Length(),
                               .pages = pages_.Pages(),
                               .first_output = first_output};
    runner_.Forward({&item, 1}, *backend_);
    pages_.Commit(tokens);
  }
  std::span<float> Logits(int64_t first, int64_t count) { return runner_.Logits(first, count); }

 private:
  formats::CacheLayout layout_;
  cache::KvCacheManager cache_;
  cache::SequenceCache pages_;
  std::unique_ptr<attention::Backend> backend_;
  runner::Runner runner_;
};

class QualityMonitor::Comparison {
 public:
  Comparison(const QualitySetup& setup, const Sequence& sequence)
      : tokens_(sequence.tokens),
        first_(sequence.first),
        chunk_(setup.served.page_size),
        vocab_(static_cast<size_t>(setup.model.Config().vocab)),
        served_(setup, setup.served, Count(), chunk_),
        exact_(setup, setup.exact, Count(), chunk_) {}

  // Compares the next chunk; false when it was the last.
  bool Work(QualityStats& stats) {
    const int64_t start = served_.Length();
    const int64_t rows = std::min(chunk_, Count() - start);
    // Row i predicts token i + 1. The prediction after the last token was not served.
    const int64_t first_output = std::min(rows, std::max<int64_t>(0, first_ - 1 - start));
    const int64_t outputs = std::min(rows, Count() - 1 - start) - first_output;
    served_.Forward(tokens_, rows, first_output);
    exact_.Forward(tokens_, rows, first_output);
    for (int64_t begin = 0; begin < outputs; begin += kLogitRows) {
      const int64_t some = std::min(kLogitRows, outputs - begin);
      const auto served = served_.Logits(begin, some);
      const auto exact = exact_.Logits(begin, some);
      for (size_t i = 0; i < static_cast<size_t>(some); ++i) {
        const double kl = runner::KlDivergence(exact.subspan(i * vocab_, vocab_), served.subspan(i * vocab_, vocab_));
        if (!std::isfinite(kl)) continue;
        ++stats.tokens;
        stats.kl_sum += kl;
        stats.kl_max = std::max(stats.kl_max, kl);
      }
    }
    return start + rows < Count();
  }

 private:
  int64_t Count() const noexcept { return static_cast<int64_t>(tokens_.size()); }

  std::span<const int32_t> tokens_;
  int64_t first_;
  int64_t chunk_;
  size_t vocab_;
  Pass served_, exact_;
};

QualityMonitor::QualityMonitor(QualitySetup setup, double rate) : setup_(std::move(setup)), rate_(rate) {}
QualityMonitor::~QualityMonitor() = default;

void QualityMonitor::Enqueue(std::span<const int32_t> tokens, int64_t first, uint64_t seed) noexcept {
  if (runner::UniformSample(seed, kSampleIndex) >= rate_) return;
  tokens = tokens.first(std::min(tokens.size(), static_cast<size_t>(kMaxTokens)));
  if (first >= static_cast<int64_t>(tokens.size()) || pending_.size() >= kMaxPending) {
    ++stats_.skipped;
    return;
  }
  try {
    pending_.push_back({{tokens.begin(), tokens.end()}, first});
  } catch (const std::bad_alloc&) {
    ++stats_.skipped;
  }
  stats_.pending = static_cast<int64_t>(pending_.size());
}

void QualityMonitor::Work() noexcept {
  if (pending_.empty()) return;
  bool more = false;
  try {
    if (!comparison_) comparison_ = std::make_unique<Comparison>(setup_, pending_.front());
    more = comparison_->Work(stats_);
    if (!more) ++stats_.requests;
  } catch (const std::exception&) {  // no memory for the comparison: the sample is skipped
    ++stats_.skipped;
  }
  if (more) return;
  comparison_.reset();
  pending_.pop_front();
  stats_.pending = static_cast<int64_t>(pending_.size());
}

}  // namespace kvanta::observe
