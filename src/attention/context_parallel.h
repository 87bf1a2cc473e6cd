// Context parallelism: each rank has some of the pages of every sequence (cache::PagePoolConfig::ranks), attends to
// them with the queries of all heads, and gets the results of its own heads from all ranks (docs/adr/0093).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/batch.h"
#include "attention/layer_view.h"
#include "attention/partial_results.h"
#include "attention/prefetch_plan.h"
#include "attention/work_list.h"
#include "base/thread_pool.h"
#include "parallel/communicator.h"

namespace kvanta::attention {

// Rows of a step that are exchanged together: consecutive ones of its batch.
struct ContextWave {
  Batch batch;  // its sequences alone
  int64_t first_row = 0;
  std::vector<WorkList> lists;  // [shape]
};

struct ContextPlan {
  std::vector<ContextWave> waves;
  std::vector<float> queries;              // f32 [rows][heads of all ranks * KeyDim()]
  std::vector<uint8_t> results, received;  // PartialResults::blocks
};

class ContextParallel {
 public:
  // layers: with the heads of all ranks. `ranks`, `kernels` and `threads` must outlive the object.
  ContextParallel(parallel::Communicator& ranks, const std::vector<LayerView>& layers,
                  const kernels::AttentionKernels& kernels, ThreadPool& threads);

  // Divides the batch into waves, whose work lists are those of `shapes`.
  void MakePlan(const Batch& batch, std::span<const WorkShape> shapes, int page_size, ContextPlan& plan) const;

  // Attention of a layer. q: f32 [rows][own heads * KeyDim()], dense; out: f32 [rows][own heads * head_dim].
  // attend(wave, queries): computes the results of this rank's pages, into queries.partial.
  template <class Attend>
  void Run(ContextPlan& plan, const LayerView& layer, const float* q, float* out, Attend attend) noexcept {
    const int64_t heads = layer.attention->heads / ranks_.Size();
    for (const ContextWave& wave : plan.waves) {
      const PartialResults partial{.blocks = plan.results.data(),
                                   .rows = wave.batch.rows,
                                   .heads = heads,
                                   .width = layer.scheme->v.shape.head_dim};
      GatherQueries(layer, q + wave.first_row * heads * layer.attention->KeyDim(), partial, plan);
      attend(wave, QueryRows{.q = plan.queries.data(),
                             .q_stride = int64_t{layer.attention->heads} * layer.attention->KeyDim(),
                             .partial = &partial});
      Merge(layer, partial, plan, out + wave.first_row * heads * layer.attention->head_dim);
    }
  }

 private:
  void GatherQueries(const LayerView& layer, const float* own, const PartialResults& partial,
                     ContextPlan& plan) noexcept;
  void Merge(const LayerView& layer, const PartialResults& partial, ContextPlan& plan, float* out) noexcept;

  parallel::Communicator& ranks_;
  const kernels::AttentionKernels& kernels_;
  ThreadPool& threads_;
  int64_t query_floats_ = 0, result_floats_ = 0, heads_ = 0;  // maxima over layers, of a row
  int64_t wave_rows_ = 1;
};

// Throws InputError for layers that ranks cannot divide by pages.
void CheckContextParallel(const cache::PagePool& pool, const BackendConfig& config);

}  // namespace kvanta::attention
