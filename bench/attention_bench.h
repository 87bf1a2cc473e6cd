// Benchmark of the CPU attention backend on quantized pages: decode (one query token) and prefill at depth (many).
// Results are verified against the reference before they are timed, and each time is reported with its roofline bound
// and the time of a bf16 cache of the same shape, measured in alternation.
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
  int layers = 1;  // layers of a page, which holds all layers' cells one after another, as in a model
  int batch = 1;
  int64_t context = 32768;  // cached tokens before the query tokens
  int query_tokens = 1;
  double seconds = 0.5;  // timed runs per row, at least 3 runs
};

// Times are medians; a run is one layer, all heads, the whole batch.
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
  double bf16_ns = 0;             // over a bf16 cache of the same shape
  double in_cache_ns = 0;         // with all pages the same one: the compute time without memory stalls
  double memory_ns = 0;           // bytes / the machine's read bandwidth
  double dot_ns = 0;              // the run's products / the peak rates of the kernels' dots
  double share_of_limit = 0;      // max(memory_ns, dot_ns) / ns_median
  double share_of_bf16_peak = 0;  // products per second / peak rate of a bf16 cache's dot
  double times_bf16 = 0;          // speedup: bf16_ns / ns_median
  double read_gb_s = 0;           // read bandwidth of the machine
  double gb_s = 0;                // bytes / ns_median
  double gelem_s = 0;             // cached elements of K and V read by query tokens, per ns_median
  double max_error = 0;           // against the reference, relative to its largest output
};

// One row per format and number of threads; `measured` is called after each. Runs cycle through the layers of at least
// 2 caches, together larger than twice the last-level cache. Throws InputError for invalid options, ResourceError if
// they need more memory than is available, and Error, before anything is timed, if a result differs from the reference
// by more than 1e-3 of its largest value (5e-2 with 8-bit operands) or depends on the threads or the layer.
std::vector<AttentionBenchRow> RunAttentionBench(const AttentionBench& options,
                                                 const std::function<void()>& measured = {});

}  // namespace kvanta::attention
