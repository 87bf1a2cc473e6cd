#include "engine/quality.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "cache/sequence_cache.h"
#include "engine/engine_config.h"
#include "runner/divergence.h"
#include "runner/philox.h"
#include "runner/runner.h"

namespace kvanta::engine {
namespace {

constexpr int64_t kLogitRows = 16;       // at once
constexpr uint64_t kDraw = 1ULL << 63U;  // an index that no token has

formats::CacheLayout ExactLayout(const EngineComponents& components) {
  const std::string exact(UnquantizedScheme(ParseDType(components.info.dtype)));
  const std::vector<KvScheme> schemes(components.layout.layers.size(), KvScheme::Parse(exact));
  return PlanLayout(schemes, components.model->Config(), components.layout.page_size);
}

}  // namespace

// One sequence through a cache of its own.
class QualityMonitor::Pass {
 public:
  Pass(const EngineComponents& components, const formats::CacheLayout& layout, int64_t tokens, int64_t chunk)
      : layout_(layout),
        cache_(components.model->ops().device(), layout_, {},
               {.budget_bytes = cache::KvCacheSpec(layout_).MaxBytes(tokens, 2), .poison_unused = false}, false),
        pages_(cache_, ""),
        backend_(components.make_backend(cache_.pool,
                                         {.layers = components.model->AttentionLayers(), .scales = components.scales})),
        runner_(*components.model, chunk, kLogitRows) {}

  int64_t Length() const noexcept { return pages_.Length(); }
  void Forward(std::span<const int32_t> tokens, int64_t rows) {
    if (!pages_.Reserve(rows)) throw std::bad_alloc();
    const auto start = static_cast<size_t>(pages_.Length());
    const runner::RunItem item{
        .tokens = tokens.subspan(start, static_cast<size_t>(rows)), .start = pages_.Length(), .pages = pages_.Pages()};
    runner_.Forward({&item, 1}, *backend_);
    pages_.Commit(tokens);
  }
  std::span<float> Logits(std::span<const int64_t> rows) { return runner_.Logits(rows); }

 private:
  formats::CacheLayout layout_;
  cache::KvCacheManager cache_;
  cache::SequenceCache pages_;
  std::unique_ptr<attention::Backend> backend_;
  runner::Runner runner_;
};

class QualityMonitor::Comparison {
 public:
  Comparison(const EngineComponents& components, const Sequence& sequence)
      : tokens_(sequence.tokens),
        first_(sequence.first),
        chunk_(components.layout.page_size),
        vocab_(static_cast<size_t>(components.info.vocab)),
        served_(components, components.layout, Count(), chunk_),
        exact_(components, ExactLayout(components), Count(), chunk_) {}

  // The next chunk; false when it was the last.
  bool Work(QualityStats& stats) {
    const int64_t start = served_.Length();
    const int64_t rows = std::min(chunk_, Count() - start);
    served_.Forward(tokens_, rows);
    exact_.Forward(tokens_, rows);
    // Row i predicts token i + 1; what follows the last token was never served.
    std::vector<int64_t> requested;
    for (int64_t row = std::max<int64_t>(0, first_ - 1 - start); row < rows && start + row + 1 < Count(); ++row) {
      requested.push_back(row);
    }
    for (size_t begin = 0; begin < requested.size(); begin += kLogitRows) {
      const auto some = std::span(requested).subspan(begin, std::min<size_t>(kLogitRows, requested.size() - begin));
      const auto served = served_.Logits(some);
      const auto exact = exact_.Logits(some);
      for (size_t i = 0; i < some.size(); ++i) {
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

QualityMonitor::QualityMonitor(const EngineComponents& components, double rate)
    : components_(components), rate_(rate) {}
QualityMonitor::~QualityMonitor() = default;

void QualityMonitor::Offer(std::span<const int32_t> tokens, int64_t first, uint64_t seed) {
  if (runner::UniformSample(seed, kDraw) >= rate_) return;
  tokens = tokens.first(std::min(tokens.size(), static_cast<size_t>(kMaxTokens)));
  if (first >= static_cast<int64_t>(tokens.size()) || pending_.size() >= kMaxPending) {
    ++stats_.skipped;
    return;
  }
  pending_.push_back({{tokens.begin(), tokens.end()}, first});
  stats_.pending = static_cast<int64_t>(pending_.size());
}

void QualityMonitor::Work() noexcept {
  if (pending_.empty()) return;
  bool more = false;
  try {
    if (!comparison_) comparison_ = std::make_unique<Comparison>(components_, pending_.front());
    more = comparison_->Work(stats_);
    if (!more) ++stats_.requests;
  } catch (const std::exception&) {  // no memory beside the engine's: that costs a sample, nothing else
    ++stats_.skipped;
  }
  if (more) return;
  comparison_.reset();
  pending_.pop_front();
  stats_.pending = static_cast<int64_t>(pending_.size());
}

}  // namespace kvanta::engine
