#include "bench/bench_caches.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "attention/batch.h"
#include "attention/reference_backend.h"
#include "base/device.h"
#include "base/math.h"
#include "bench/random_scales.h"
#include "bench/random_values.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;
using kernels::Dot;

constexpr int64_t kTemplatePages = 8;        // pages that are encoded; the others are copies of their records
constexpr int64_t kAssumedCache = 64 << 20;  // bytes, if the system does not report the size of its last-level cache

int64_t LastLevelCacheBytes() {
  const int64_t bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? bytes : kAssumedCache;
}

double& ProductsOf(BenchWork& work, const formats::Format& format) {
  return work.products[static_cast<size_t>(kernels::DotOf(format.code))];
}

}  // namespace

double BenchWork::Products() const noexcept {
  double sum = 0;
  for (const double count : products) sum += count;
  return sum;
}

BenchCaches::BenchCaches(const AttentionBench& options, const std::string& format)
    : options_(options),
      layout_(formats::PlanCache(
          std::vector<KvScheme>(static_cast<size_t>(options.layers), KvScheme::Parse(format)),
          std::vector<formats::LayerShape>(static_cast<size_t>(options.layers), {options.kv_heads, options.head_dim}),
          options.page_size)) {
  tokens_ = options.context + options.query_tokens;
  pages_ = CeilDiv(tokens_, options.page_size);
  const int64_t batch_bytes = options.batch * pages_ * layout_.page_bytes;
  copies_ = std::max<int64_t>(2, 2 * LastLevelCacheBytes() / std::max<int64_t>(batch_bytes, 1) + 1);
  const int64_t exact_pages = ExactPagesOfSequence();
  const int64_t sequences = copies_ * options.batch;
  const int64_t budget = sequences * (pages_ * layout_.page_bytes + exact_pages * layout_.exact_page_bytes) +
                         kTemplatePages * (layout_.page_bytes + layout_.exact_page_bytes);
  // Every record is written, so all memory is needed; with overcommit the allocation would succeed and the process be
  // killed.
  if (budget > Cpu().AvailableBytes()) {
    throw ResourceError(
        fmt::format("bench: {} caches of {} tokens in {} take {} bytes, {} are available; shorten "
                    "the context or the batch",
                    sequences, tokens_, format, budget, Cpu().AvailableBytes()));
  }
  store_.emplace(Cpu(), layout_, cache::PagePoolConfig{.budget_bytes = budget});
  config_.layers.assign(static_cast<size_t>(options.layers),
                        {.heads = options.heads,
                         .kv_heads = options.kv_heads,
                         .head_dim = options.head_dim,
                         .softmax_scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim))});
  config_.scales.assign(static_cast<size_t>(options.layers), RandomScales(layout_.layers.front(), 11));
  Fill();
}

// stride: 1 for a table per sequence, 0 for one table for all.
std::vector<SequenceSpan> BenchCaches::MakeSpans(const cache::PageRef* const* tables, int stride) const {
  std::vector<SequenceSpan> spans;
  for (int i = 0; i < options_.batch; ++i) {
    spans.push_back({.start = options_.context, .tokens = options_.query_tokens, .pages = tables + i * stride});
  }
  return spans;
}

std::vector<SequenceSpan> BenchCaches::Spans(int64_t copy) const {
  return MakeSpans(&table_data_[static_cast<size_t>(copy * options_.batch)], 1);
}

std::vector<SequenceSpan> BenchCaches::SpansOfOnePage() const {
  return MakeSpans(&one_page_data_, 0);
}

BenchWork BenchCaches::Work() const {
  const formats::LayerScheme& layer = layout_.layers.front();
  BenchWork work;
  for (int64_t page = 0; page < pages_; ++page) {  // pages of the last query token; the others read the same pages
    const int64_t slots = std::min<int64_t>(options_.page_size, tokens_ - page * options_.page_size);
    const bool exact = ExactPagesOf(layer).Reads(pages_ - 1, page);
    work.bytes += (exact ? layer.exact_bytes : layer.bytes) * slots / options_.page_size;
  }
  const double channels = double{1} * options_.heads * options_.head_dim * options_.batch;
  for (int64_t token = options_.context; token < tokens_; ++token) {
    const int64_t own = token / options_.page_size;
    int64_t exact = 0;
    for (int64_t page = 0; page <= own; ++page) {
      if (!ExactPagesOf(layer).Reads(own, page)) continue;
      exact += std::min<int64_t>(options_.page_size, token + 1 - page * options_.page_size);
    }
    ProductsOf(work, *layer.k.format) += channels * static_cast<double>(token + 1 - exact);
    ProductsOf(work, *layer.v.format) += channels * static_cast<double>(token + 1 - exact);
    work.products[static_cast<size_t>(Dot::kExact)] += 2 * channels * static_cast<double>(exact);
  }
  work.bytes *= options_.batch;
  return work;
}

// Sink pages, and every page that the query tokens, or the earlier tokens of their pages, are written to.
int64_t BenchCaches::ExactPagesOfSequence() const {
  if (layout_.exact_page_bytes == 0) return 0;
  return std::min<int64_t>(pages_, layout_.layers.front().sink_pages) + pages_ - FirstExactPage();
}

// First page that a query token reads exactly although it is not a sink page.
int64_t BenchCaches::FirstExactPage() const {
  return std::max<int64_t>(0, FirstWrittenPage() + 1 - layout_.layers.front().exact_pages);
}

uint8_t* BenchCaches::Record(PageKind kind, cache::PageId page) {
  return store_->Record(0, kind, page);
}

void BenchCaches::Copy(PageKind kind, cache::PageId from, cache::PageId to) {
  std::memcpy(Record(kind, to), Record(kind, from), static_cast<size_t>(store_->RecordBytes(0, kind)));
}

void BenchCaches::Write(Backend& backend, const cache::BlockTable& table, int64_t start, int64_t count, uint32_t seed) {
  const int64_t width = int64_t{options_.kv_heads} * options_.head_dim;
  const std::vector<float> k = NormalValues(count * width, seed), v = NormalValues(count * width, seed + 1);
  const cache::PageRef* const pages = table.data();
  const SequenceSpan span{.start = start, .tokens = static_cast<int>(count), .pages = &pages};
  const std::unique_ptr<Plan> plan = backend.MakePlan({.sequences = {&span, 1}}, nullptr);
  for (int layer = 0; layer < options_.layers; ++layer) backend.Append(*plan, layer, k.data(), v.data(), width);
}

void BenchCaches::Fill() {
  const std::unique_ptr<Backend> writer = MakeReferenceBackend(*store_, config_);
  const bool exact = layout_.exact_page_bytes > 0;
  cache::BlockTable templates(kTemplatePages);
  for (cache::PageRef& page : templates) {
    page.quantized = store_->Allocate(0, PageKind::kQuantized);
    if (exact) page.exact = store_->Allocate(0, PageKind::kExact);
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
      ref.quantized = store_->Allocate(0, PageKind::kQuantized);
      Copy(PageKind::kQuantized, source.quantized, ref.quantized);
      if (exact && (page >= FirstExactPage() || page < layout_.layers.front().sink_pages)) {
        ref.exact = store_->Allocate(0, PageKind::kExact);
        Copy(PageKind::kExact, source.exact, ref.exact);
      }
    }
    const int64_t start = written * options_.page_size;
    Write(*writer, tables_[i], start, tokens_ - start, static_cast<uint32_t>(100 + 2 * i));
  }
  one_page_.assign(static_cast<size_t>(pages_), tables_.front().back());  // the last page has all that any has
  for (const cache::BlockTable& table : tables_) table_data_.push_back(table.data());
  one_page_data_ = one_page_.data();
}

}  // namespace kvanta::attention
