// Measures the attention backends on really quantized pages: decode (one query token) and prefill at depth (many).
// Every result is verified against the reference before it is timed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvanta::attention {

struct AttentionBench {
  std::vector<std::string> formats = {"bf16"};  // texts for KvScheme::Parse
  std::string isa = "auto";                     // a unit's name, as in MakeCpuBackend
  std::vector<int> threads = {1};
  std::vector<double> limit_gb_s = {};  // the machine's read bandwidth per entry of `threads`; empty: unknown
  int heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int page_size = 64;
  int batch = 1;
  int64_t context = 32768;  // cached tokens before the query tokens
  int query_tokens = 1;
  double seconds = 0.5;  // of timed runs per row, at least 5 runs
};

struct AttentionBenchRow {
  std::string format;
  std::string isa;
  int threads = 0;
  int batch = 0;
  int64_t context = 0;
  int query_tokens = 0;
  int64_t bytes = 0;  // stored cache bytes that one run reads
  double ns_min = 0;  // of one run: one layer, all heads, the whole batch
  double ns_median = 0;
  double gb_s = 0;            // bytes / ns_median
  double gelem_s = 0;         // cached elements that query tokens met, K and V, per ns_median
  double share_of_limit = 0;  // gb_s / limit; 0 where the limit is unknown
  double max_error = 0;       // against the reference, relative to its largest output
};

// One row per format and number of threads. At least 4 caches, together larger than twice the last-level cache, take
// turns. Throws InputError for options that do not fit, ResourceError when they need more memory than there is, Error
// when a result differs from the reference by more than 1e-3 of its largest value (nothing is timed then).
std::vector<AttentionBenchRow> RunAttentionBench(const AttentionBench& options);

}  // namespace kvanta::attention
