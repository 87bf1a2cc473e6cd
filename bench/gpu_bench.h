// Measures attention on a GPU over really quantized pages, beside the GPU's copy bandwidth, by its own clock. Every
// format's rows are held to the reference before anything is timed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/attention_bench.h"
#include "kernels/cuda/cuda_context.h"

namespace kvanta::attention {

// Times are of one layer, all heads, the whole batch; each launch finds the second-level cache full of other bytes.
struct GpuBenchRow {
  std::string format;
  std::string unit;  // "cuda-sm90"
  int batch = 0;
  int64_t context = 0;
  int query_tokens = 0;
  int64_t bytes = 0;  // stored cache bytes that one run reads
  double ns_min = 0;
  double ns_median = 0;
  double copy_gb_s = 0;       // of the GPU's memory, bytes read and written, in turns with the runs
  double gb_s = 0;            // bytes / ns_median
  double share_of_limit = 0;  // gb_s / copy_gb_s
  double max_error = 0;       // against the reference, values being of standard deviation 1
};

// One row per format; of `options`, isa and threads mean nothing, nor, for a format of latents alone, kv_heads and
// head_dim: it is measured at rank 512 with 64 rotated channels. flush_bytes: of what is written between two runs, and
// copied to learn the bandwidth. Throws InputError, ResourceError, and Error when a result differs from the reference.
std::vector<GpuBenchRow> RunGpuBench(const AttentionBench& options, const std::shared_ptr<kernels::CudaContext>& gpu,
                                     size_t flush_bytes = size_t{256} << 20,
                                     const std::function<void()>& measured = {});

}  // namespace kvanta::attention
