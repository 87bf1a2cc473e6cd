// Measures the CPU backend on really quantized pages: decode (one query token) and prefill at depth (many). Every
// result is verified against the reference before it is timed, and every time stands beside what the machine would need
// at least, and beside a bf16 cache of the same shape, all measured in turns.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvanta::attention {

struct AttentionBench {
  std::vector<std::string> formats = {"bf16"};  // texts for KvScheme::Parse
  std::string isa = "auto";                     // a unit's name, as in MakeCpuBackend
  std::vector<int> threads = {1};
  int heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int page_size = 64;
  int batch = 1;
  int64_t context = 32768;  // cached tokens before the query tokens
  int query_tokens = 1;
  double seconds = 0.5;  // of timed runs per row, at least 3 runs
};

// Times are medians of one run: one layer, all heads, the whole batch.
struct AttentionBenchRow {
  std::string format;
  std::string isa;
  int threads = 0;
  int batch = 0;
  int64_t context = 0;
  int query_tokens = 0;
  int64_t bytes = 0;  // stored cache bytes that one run reads
  double ns_min = 0;
  double ns_median = 0;
  double bf16_ns = 0;             // the same over a bf16 cache
  double in_cache_ns = 0;         // the same where all pages are one: what the kernels take without waiting for memory
  double memory_ns = 0;           // bytes at the rate that the machine reads at
  double dot_ns = 0;              // the run's products at the peaks of the dots that the kernels are made of
  double share_of_limit = 0;      // the larger of both / ns_median
  double share_of_bf16_peak = 0;  // products per second / those at the peak of a bf16 cache's dot
  double times_bf16 = 0;          // bf16_ns / ns_median: how many times faster
  double read_gb_s = 0;           // of the machine
  double gb_s = 0;                // bytes / ns_median
  double gelem_s = 0;             // cached elements that query tokens met, K and V, per ns_median
  double max_error = 0;           // against the reference, relative to its largest output
};

// One row per format and number of threads; `measured` is called after each. At least 2 caches, together larger than
// twice the last-level cache, take turns. Throws InputError for options that do not fit, ResourceError when they need
// more memory than there is, Error when a result differs from the reference by more than 1e-3 of its largest value
// (5e-2 where coefficients have 8 bits) or with the number of threads; nothing is timed then.
std::vector<AttentionBenchRow> RunAttentionBench(const AttentionBench& options,
                                                 const std::function<void()>& measured = {});

}  // namespace kvanta::attention
