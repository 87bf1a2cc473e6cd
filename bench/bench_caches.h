// Caches of the attention benchmark: encoded pages, in several batches.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "bench/attention_bench.h"
#include "bench/roofline.h"
#include "cache/block_table.h"
#include "cache/page_pool.h"

namespace kvanta::attention {

// Minimum work of one run over a batch.
struct BenchWork {
  int64_t bytes = 0;                              // stored bytes read, each once
  std::array<double, kernels::kDots> products{};  // products of codes with queries or probabilities, by kernels::Dot

  double Products() const noexcept;
};

// Caches of one format: `copies` batches of sequences whose pages hold encodings of random rows.
class BenchCaches {
 public:
  // Throws InputError for an invalid format or shape, ResourceError if memory is insufficient.
  BenchCaches(const AttentionBench& options, const std::string& format);

  cache::PagePool& store() { return *store_; }
  const BackendConfig& config() const { return config_; }
  int64_t copies() const { return copies_; }

  // Query tokens of batch `copy`.
  std::vector<SequenceSpan> Spans(int64_t copy) const;
  // Query tokens of a batch whose pages are all the same page, which stays in the CPU's caches.
  std::vector<SequenceSpan> SpansOfOnePage() const;

  // Work of the whole batch, by the page rule.
  BenchWork Work() const;

 private:
  std::vector<SequenceSpan> MakeSpans(const cache::PageRef* const* tables, int stride) const;
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

}  // namespace kvanta::attention
