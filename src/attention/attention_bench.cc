#include "attention/attention_bench.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <utility>

#include "attention/batch.h"
#include "attention/cpu_backend.h"
#include "attention/reference_backend.h"
#include "base/device.h"
#include "kernels/cpu/attention_table.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;

// Of the largest output: ten times what coefficients of 16 and of 8 bits may cost.
constexpr double kLargestError = 1e-3;
constexpr double kLargestNarrowError = 5e-2;
constexpr int64_t kTemplatePages = 8;        // pages encoded for real; the others are copies of their records
constexpr int64_t kAssumedCache = 64 << 20;  // bytes, where the system does not say how large its last-level cache is

std::vector<float> Normal(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

int64_t LastLevelCacheBytes() {
  const int64_t bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? bytes : kAssumedCache;
}

void Check(const AttentionBench& options) {
  if (options.formats.empty() || options.threads.empty()) throw InputError("bench: no formats or no thread counts");
  for (const int threads : options.threads) {
    if (threads < 1) throw InputError(fmt::format("bench: threads is {}, needs at least 1", threads));
  }
  if (options.batch < 1 || options.query_tokens < 1 || options.context < 0) {
    throw InputError(fmt::format("bench: batch {} and query_tokens {} must be at least 1, context {} at least 0",
                                 options.batch, options.query_tokens, options.context));
  }
  if (!(options.seconds >= 0 && options.seconds <= 3600)) {
    throw InputError(fmt::format("bench: seconds is {}, must be from 0 to 3600", options.seconds));
  }
}

// The caches of one format: `copies` batches of sequences whose pages hold real encodings of random rows.
class BenchCaches {
 public:
  BenchCaches(const AttentionBench& options, const std::string& format)
      : options_(options),
        layout_(
            formats::PlanCache({KvScheme::Parse(format)}, {{options.kv_heads, options.head_dim}}, options.page_size)) {
    tokens_ = options.context + options.query_tokens;
    pages_ = (tokens_ + options.page_size - 1) / options.page_size;
    const int64_t batch_bytes = options.batch * pages_ * layout_.page_bytes;
    copies_ = std::max<int64_t>(4, 2 * LastLevelCacheBytes() / std::max<int64_t>(batch_bytes, 1) + 1);
    const int64_t exact_pages = ExactPagesOfSequence();
    const int64_t sequences = copies_ * options.batch;
    const int64_t budget = sequences * (pages_ * layout_.page_bytes + exact_pages * layout_.exact_page_bytes) +
                           kTemplatePages * (layout_.page_bytes + layout_.exact_page_bytes);
    // Each record is written, so all of it is needed; a system that promises memory it lacks would end the process.
    if (budget > Cpu().AvailableBytes()) {
      throw ResourceError(
          fmt::format("bench: {} caches of {} tokens in {} take {} bytes, {} are available; shorten "
                      "the context or the batch",
                      sequences, tokens_, format, budget, Cpu().AvailableBytes()));
    }
    store_.emplace(Cpu(), layout_, cache::PageStoreConfig{.budget_bytes = budget});
    config_.layers.push_back({.heads = options.heads,
                              .kv_heads = options.kv_heads,
                              .head_dim = options.head_dim,
                              .softmax_scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim))});
    Fill();
  }

  cache::PageStore& store() { return *store_; }
  const BackendConfig& config() const { return config_; }
  int64_t copies() const { return copies_; }

  // The query tokens of batch `copy`.
  std::vector<SequenceSpan> Spans(int64_t copy) const {
    std::vector<SequenceSpan> spans;
    for (int i = 0; i < options_.batch; ++i) {
      const cache::BlockTable& table = tables_[static_cast<size_t>(copy * options_.batch + i)];
      spans.push_back({.start = options_.context, .tokens = options_.query_tokens, .pages = table.data()});
    }
    return spans;
  }

  // Stored bytes that the last query token reads, by the page rule; all tokens together read the same pages.
  int64_t BytesRead() const {
    const formats::LayerScheme& layer = layout_.layers.front();
    int64_t bytes = 0;
    for (int64_t page = 0; page < pages_; ++page) {
      const int64_t slots = std::min<int64_t>(options_.page_size, tokens_ - page * options_.page_size);
      const bool exact = ReadsExact(layer, pages_ - 1, page);
      bytes += (exact ? layer.exact_bytes : layer.bytes) * slots / options_.page_size;
    }
    return bytes * options_.batch;
  }

 private:
  // The sink pages, and every page that the query tokens or the tokens before them on their page are written to.
  int64_t ExactPagesOfSequence() const {
    if (layout_.exact_page_bytes == 0) return 0;
    return std::min<int64_t>(pages_, layout_.layers.front().sink_pages) + pages_ - FirstExactPage();
  }
  // The first page that some query token reads exactly though it is no sink.
  int64_t FirstExactPage() const {
    return std::max<int64_t>(0, FirstWrittenPage() + 1 - layout_.layers.front().exact_pages);
  }
  int64_t FirstWrittenPage() const { return options_.context / options_.page_size; }

  uint8_t* Record(PageKind kind, cache::PageId page) { return store_->Base(kind) + page * store_->RecordBytes(kind); }
  void Copy(PageKind kind, cache::PageId from, cache::PageId to) {
    std::memcpy(Record(kind, to), Record(kind, from), static_cast<size_t>(store_->RecordBytes(kind)));
  }

  void Write(Backend& backend, const cache::BlockTable& table, int64_t start, int64_t count, uint32_t seed) {
    const int64_t width = int64_t{options_.kv_heads} * options_.head_dim;
    const std::vector<float> k = Normal(count * width, seed), v = Normal(count * width, seed + 1);
    const SequenceSpan span{.start = start, .tokens = static_cast<int>(count), .pages = table.data()};
    const std::unique_ptr<Plan> plan = backend.MakePlan({.sequences = {&span, 1}}, nullptr);
    backend.Append(*plan, 0, k.data(), v.data(), width);
  }

  void Fill() {
    const std::unique_ptr<Backend> writer = MakeReferenceBackend(*store_, config_);
    const bool exact = layout_.exact_page_bytes > 0;
    cache::BlockTable templates(kTemplatePages);
    for (cache::PageRef& page : templates) {
      page.quantized = store_->Allocate(PageKind::kQuantized);
      if (exact) page.exact = store_->Allocate(PageKind::kExact);
    }
    Write(*writer, templates, 0, kTemplatePages * options_.page_size, 1);
    tables_.resize(static_cast<size_t>(copies_ * options_.batch));
    const int64_t written = FirstWrittenPage();
    for (size_t i = 0; i < tables_.size(); ++i) {
      tables_[i].resize(static_cast<size_t>(pages_));
      for (int64_t page = 0; page < pages_; ++page) {
        cache::PageRef& ref = tables_[i][static_cast<size_t>(page)];
        const cache::PageRef& source =
            templates[page == 0 ? 0 : (static_cast<size_t>(page) + i) % static_cast<size_t>(kTemplatePages)];
        ref.quantized = store_->Allocate(PageKind::kQuantized);
        Copy(PageKind::kQuantized, source.quantized, ref.quantized);
        if (exact && (page >= FirstExactPage() || page < layout_.layers.front().sink_pages)) {
          ref.exact = store_->Allocate(PageKind::kExact);
          Copy(PageKind::kExact, source.exact, ref.exact);
        }
      }
      const int64_t start = written * options_.page_size;
      Write(*writer, tables_[i], start, tokens_ - start, static_cast<uint32_t>(100 + 2 * i));
    }
  }

  const AttentionBench& options_;
  formats::CacheLayout layout_;
  int64_t tokens_ = 0;
  int64_t pages_ = 0;
  int64_t copies_ = 0;
  std::optional<cache::PageStore> store_;
  BackendConfig config_;
  std::vector<cache::BlockTable> tables_;
};

// Largest difference between the last query token's row of every sequence of copy 0 and the reference's, relative to
// the reference's largest value.
double ErrorOf(BenchCaches& caches, const AttentionBench& options, const std::vector<float>& q,
               const std::vector<float>& out) {
  const int64_t width = int64_t{options.heads} * options.head_dim;
  const std::unique_ptr<Backend> reference = MakeReferenceBackend(caches.store(), caches.config());
  std::vector<float> expected(static_cast<size_t>(width));
  double error = 0;
  double largest = 0;
  int64_t row = -1;
  for (SequenceSpan last : caches.Spans(0)) {
    row += last.tokens;
    last.start += last.tokens - 1;
    last.tokens = 1;
    const std::unique_ptr<Plan> plan = reference->MakePlan({.sequences = {&last, 1}}, nullptr);
    reference->Run(*plan, 0, q.data() + row * width, width, expected.data());
    for (int64_t i = 0; i < width; ++i) {
      const double value = expected[static_cast<size_t>(i)];
      const double difference = std::abs(out[static_cast<size_t>(row * width + i)] - value);
      if (!(difference <= error)) error = difference;
      largest = std::max(largest, std::abs(value));
    }
  }
  return error / largest;
}

AttentionBenchRow Measure(BenchCaches& caches, const AttentionBench& options, const std::string& format, int threads,
                          double limit_gb_s) {
  const int64_t width = int64_t{options.heads} * options.head_dim;
  const int64_t rows = int64_t{options.batch} * options.query_tokens;
  const std::unique_ptr<Backend> backend =
      MakeCpuBackend(caches.store(), caches.config(), std::make_shared<ThreadPool>(threads), options.isa.c_str());
  const std::vector<float> q = Normal(rows * width, 7);
  std::vector<float> out(static_cast<size_t>(rows * width));
  std::vector<std::vector<SequenceSpan>> spans;
  std::vector<std::unique_ptr<Plan>> plans;
  for (int64_t copy = 0; copy < caches.copies(); ++copy) {
    spans.push_back(caches.Spans(copy));
    plans.push_back(backend->MakePlan({.sequences = spans.back()}, nullptr));
  }
  AttentionBenchRow result{.format = format,
                           .isa = backend->Info().name.substr(4),  // "cpu-avx2" -> "avx2"
                           .threads = threads,
                           .batch = options.batch,
                           .context = options.context,
                           .query_tokens = options.query_tokens,
                           .bytes = caches.BytesRead()};
  backend->Run(*plans[0], 0, q.data(), width, out.data());
  result.max_error = ErrorOf(caches, options, q, out);
  const formats::LayerScheme& scheme = caches.store().Layout().layers.front();
  const bool narrow = kernels::IsNarrow(scheme.k.format->code) || kernels::IsNarrow(scheme.v.format->code);
  if (!(result.max_error <= (narrow ? kLargestNarrowError : kLargestError))) {
    throw Error(fmt::format("bench: {} on {} differs from the reference by {:.1e} of its largest value", format,
                            result.isa, result.max_error));
  }
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  double total = 0;
  for (size_t i = 1; total < options.seconds * 1e9 || times.size() < 5; ++i) {
    const Clock::time_point begin = Clock::now();
    backend->Run(*plans[i % plans.size()], 0, q.data(), width, out.data());
    times.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count());
    total += times.back();
  }
  std::sort(times.begin(), times.end());
  result.ns_min = times.front();
  result.ns_median = times[times.size() / 2];
  result.gb_s = static_cast<double>(result.bytes) / result.ns_median;
  const double met = static_cast<double>(options.query_tokens) *
                     (static_cast<double>(options.context) + (options.query_tokens + 1) / 2.0);
  result.gelem_s = met * options.batch * options.kv_heads * options.head_dim * 2 / result.ns_median;
  result.share_of_limit = limit_gb_s > 0 ? result.gb_s / limit_gb_s : 0;
  return result;
}

}  // namespace

std::vector<AttentionBenchRow> RunAttentionBench(const AttentionBench& options) {
  Check(options);
  std::vector<AttentionBenchRow> rows;
  for (const std::string& format : options.formats) {
    BenchCaches caches(options, format);
    for (size_t i = 0; i < options.threads.size(); ++i) {
      const double limit = i < options.limit_gb_s.size() ? options.limit_gb_s[i] : 0;
      rows.push_back(Measure(caches, options, format, options.threads[i], limit));
    }
  }
  return rows;
}

}  // namespace kvanta::attention
