// Attention to chosen tokens (sparse attention) on a CPU: copies their cells, in the order of their positions, to pages
// that the kernels of dense attention read. Where all tokens are chosen, the pages are the sequence's own, so the bits
// are those of dense attention (docs/adr/0088).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/layer_view.h"
#include "attention/tile_attention.h"
#include "attention/token_selector.h"
#include "base/device.h"
#include "base/thread_pool.h"

namespace kvanta::attention {

class GatheredAttention {
 public:
  // layers: those with index_topk and rotated channels (latents) are used. All arguments outlive it.
  GatheredAttention(Device& device, const std::vector<LayerView>& layers, int top_k,
                    const kernels::AttentionKernels& kernels, ThreadPool& threads);

  // Attention of the sparse rows: q and out as in Backend::Run. workspaces: one per thread, their queries are lost.
  void Run(const Batch& batch, const ChosenTokens& chosen, int layer, const float* q, int64_t q_stride, float* out,
           std::vector<TileWorkspace>& workspaces) noexcept;

 private:
  // A thread's records of gathered pages and their block table.
  struct Workspace {
    Buffer quantized, exact;
    std::vector<cache::PageRef> table;
  };
  // Pages [first, last) of a row's chosen tokens, copied to the workspace.
  void Gather(const LayerView& layer, const cache::PageRef* table, const cache::GatheredPages& pages,
              const SparseRow& row, std::span<const int32_t> positions, int64_t first, int64_t last,
              Workspace& workspace) const noexcept;

  const std::vector<LayerView>& layers_;
  const kernels::AttentionKernels& kernels_;
  ThreadPool& threads_;
  std::vector<formats::LayerScheme> schemes_;  // of the layers, alone in a record
  int page_size_ = 0;
  int64_t max_splits_ = 0;
  int rows_ = 0;  // query heads of a token, the most of any layer
  int head_dim_ = 0;
  std::vector<Workspace> workspaces_;
  // Results of splits, where there are fewer rows than threads: [rows][splits][query heads].
  std::vector<SoftmaxState> split_states_;
  std::vector<float> split_out_;  // [...][head_dim]
};

}  // namespace kvanta::attention
