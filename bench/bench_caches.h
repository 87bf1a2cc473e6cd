// The caches that the attention benchmark reads: really encoded pages, several batches that take turns.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "bench/attention_bench.h"
#include "cache/block_table.h"
#include "cache/page_pool.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

// What one run over a batch cannot do without.
struct BenchWork {
  int64_t bytes = 0;                              // stored bytes that it reads, each once
  std::array<double, kernels::kDots> products{};  // of codes with a query or a weight, by kernels::Dot

  double Products() const noexcept;
};

// The caches of one format: `copies` batches of sequences whose pages hold real encodings of random rows.
class BenchCaches {
 public:
  // Throws InputError for a format or shape that does not fit, ResourceError where memory is short.
  BenchCaches(const AttentionBench& options, const std::string& format);

  cache::PagePool& store() { return *store_; }
  const BackendConfig& config() const { return config_; }
  int64_t copies() const { return copies_; }

  // The query tokens of batch `copy`.
  std::vector<SequenceSpan> Spans(int64_t copy) const;
  // The same of a batch whose pages are all one page, which the CPU's caches keep.
  std::vector<SequenceSpan> SpansOfOnePage() const;

  // By the page rule, of the whole batch.
  BenchWork Work() const;

 private:
  std::vector<SequenceSpan> SpansOf(const cache::PageRef* const* tables, int stride) const;
  int64_t ExactPagesOfSequence() const;
  int64_t FirstExactPage() const;
  int64_t FirstWrittenPage() const { return options_.context / options_.page_size; }
  uint8_t* Record(cache::PageKind kind, cache::PageId page);
  void Copy(cache::PageKind kind, cache::PageId from, cache::PageId to);
  void Write(Backend& backend, const cache::BlockTable& table, int64_t start, int64_t count, uint32_t seed);
  void Fill();

  const AttentionBench& options_;
  formats::CacheLayout layout_;
  int64_t tokens_ = 0;
  int64_t pages_ = 0;
  int64_t copies_ = 0;
  std::optional<cache::PagePool> store_;
  BackendConfig config_;
  std::vector<cache::BlockTable> tables_;
  cache::BlockTable one_page_;
  std::vector<const cache::PageRef*> table_data_;
  const cache::PageRef* one_page_data_ = nullptr;
};

// Random values with the normal distribution.
std::vector<float> NormalValues(int64_t count, uint32_t seed);

}  // namespace kvanta::attention
