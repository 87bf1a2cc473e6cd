// Benchmark of attention on a GPU over quantized pages, against the GPU's copy bandwidth, by GPU timers. Every format's
// results are verified against the reference before anything is timed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/attention_bench.h"
#include "kernels/cuda/cuda_context.h"

namespace kvanta::attention {

// Times of one layer, all heads, the whole batch, with an L2 cache full of other data.
struct GpuBenchRow {
  std::string format;
  std::string unit;  // "cuda-sm90"
  int batch = 0;
  int64_t context = 0;
  int query_tokens = 0;
  int64_t bytes = 0;  // stored cache bytes read by one run
  double ns_min = 0;
  double ns_median = 0;
  double copy_gb_s = 0;       // rate of the GPU's memory, bytes read and written, measured in alternation with the runs
  double gb_s = 0;            // bytes / ns_median
  double share_of_limit = 0;  // gb_s / copy_gb_s
  double max_error = 0;       // against the reference, for values of standard deviation 1
};

// One row per format. `options`: isa and threads are ignored, and so are kv_heads and head_dim for a format of latents
// only, which is measured at rank 512 with 64 rotary channels. flush_bytes: bytes copied between runs, to evict L2 and
// to measure the bandwidth. Throws InputError, ResourceError, and Error if a result differs from the reference.
std::vector<GpuBenchRow> RunGpuBench(const AttentionBench& options, const std::shared_ptr<kernels::CudaContext>& gpu,
                                     size_t flush_bytes = size_t{256} << 20,
                                     const std::function<void()>& measured = {});

}  // namespace kvanta::attention
