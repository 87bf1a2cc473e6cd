// What a GPU's kernels are told of a layer, but for what changes from step to step.
#pragma once

#include <string>
#include <vector>

#include "attention/backend.h"
#include "kernels/attention/cuda/launch.h"

namespace kvanta::attention {

// One cell of each KV head, as Append writes it.
struct GpuCell {
  int kernel = -1;
  int exact_kernel = -1;  // into exact records
  int first_channel = 0;  // in the rows of k or v
  kernels::cuda::AppendParams side;
};

struct GpuLayer {
  std::vector<GpuCell> cells;  // K; V unless it is K's cell; K's plain channels where there are some
  bool exact_open = false;
  int group = 0;  // KV cache group
  int attend_kernel = -1;
  kernels::cuda::AttentionParams attend;
};

// Makes them, and keeps the constants of a configuration in the device's memory.
class GpuLayers {
 public:
  GpuLayers(const cache::PagePool& store, const BackendConfig& config) : store_(store), config_(config) {}

  // sums: of K and of V. Throws InputError where there is no kernel for what the layer needs, naming `gpu`.
  GpuLayer Make(size_t index, kernels::cuda::AppendSums* sums, const std::string& gpu);

 private:
  GpuCell SideOf(size_t index, bool is_key);
  GpuCell UnquantizedOf(size_t index, const kernels::cuda::AppendParams& k) const;
  template <class T>
  const T* Upload(const std::vector<T>& values);

  const cache::PagePool& store_;
  const BackendConfig& config_;
  std::vector<Buffer> constants_;
};

}  // namespace kvanta::attention
