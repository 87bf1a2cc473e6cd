// Interface of an attention backend: Info / MakePlan / Append / Run. docs/engine-contract.md is normative.
//
// MakePlan prepares one step for all sequences of the batch. For each layer, Append then writes the new tokens' K and V
// into the cache (and quantizes pages that close), and Run computes attention. Results are batch-invariant: a row
// depends only on its position and the bytes it reads, never on chunking, batch, prefix hits or the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/block_table.h"
#include "cache/page_pool.h"
#include "cache/recurrent_state.h"
#include "cache/visibility.h"
#include "formats/scheme.h"
#include "kernels/head_transform.h"
#include "kernels/linear/linear.h"
#include "parallel/communicator.h"

namespace kvanta::attention {

// Attention parameters of a layer; constant for a model.
struct AttentionSpec {
  int heads = 0;     // query heads; a multiple of kv_heads
  int kv_heads = 0;  // 0: a recurrent layer, which has no attention (States)
  int head_dim = 0;  // a multiple of 8, at most the backend's kMaxHeadDim; MLA: rank of the latents, 8..512
  int rope_dim = 0;  // 0: separate K and V; else MLA: K and V share one latent, K has these channels in addition
  // Above 0, sparse attention: of latents, to the tokens that the step's last Select chose; of keys without V
  // (formats::LayerShape::keys_only), the number of tokens that Select chooses. The same in all layers that have one.
  int index_topk = 0;
  // Rows that are K and V in one (formats::LayerShape::shared_kv): the layer of the cache with the compressed entries
  // that queries attend to besides the tokens of their window: those that Select chose, or, without index_topk, all
  // that end at or before the query. -1: none.
  int entries_layer = -1;
  float softmax_scale = 0;  // usually 1/sqrt(head_dim)
  float softcap = 0;        // 0: none; else logits = softcap * tanh(logits / softcap)
  cache::Visibility visibility = {};
  // Attention sinks: [heads] logits that take part in the softmax of every row of a head, without a value; empty: none.
  std::vector<float> sinks = {};

  int KeyDim() const noexcept { return head_dim + rope_dim; }
};

// New tokens of one sequence in a step: positions [start, start + tokens). All their pages are allocated.
struct SequenceSpan {
  int64_t start = 0;                   // tokens already in the cache
  int tokens = 0;                      // new tokens, >= 1
  int drafts = 0;                      // the last of them, which may be rejected: states are stored without them
  cache::BlockTables pages = nullptr;  // [KV cache group][ceil((start + tokens) / page_size)], valid during the step
};

struct BatchShape {
  std::span<const SequenceSpan> sequences;  // rows of q, k, v are concatenated in this order
  // CUDA-graph bucket; 0: none. Otherwise each sequence has one token, and launches of Append and Run stay valid for
  // any such step of up to this many sequences (Plan::Version).
  int64_t bucket = 0;
};

// New rows of a layer before norms and RoPE of their heads. f32, row strides in floats.
struct HeadRows {
  float* q = nullptr;  // [rows][heads * head_dim]
  int64_t q_stride = 0;
  kernels::HeadTransform q_transform = {};
  const float* k = nullptr;  // [rows][kv_heads * head_dim], here and below
  const float* v = nullptr;  // which has neither
  int64_t kv_stride = 0;
  kernels::HeadTransform k_transform = {};
  int64_t rows = 0;
};

// Quantization counters since the backend was created: saturated and NaN values, and blocks whose scale is zero (they
// dequantize to zeros). `blocks` counts blocks, or rows where a row has one scale, of symmetric formats that quantize
// each row independently.
struct SideCounts : formats::EncodeCounts {
  int64_t blocks = 0, zero_blocks = 0;
};
struct AppendCounts {
  SideCounts k;
  SideCounts v;
};

struct BackendInfo {
  std::string name;  // "cpu-amx", "cpu-avx512", "cpu-avx2", "cpu-portable", "reference", "cuda-sm90"
  std::vector<formats::ElementType> codes;  // supported element types
};

// Opaque state of a step, created by Backend::MakePlan. Passing it to the next MakePlan reuses its memory.
class Plan {
 public:
  virtual ~Plan() = default;
  // Version of a GPU plan: a CUDA graph captured with a plan of some bucket can be replayed for later steps of that
  // bucket while the version is unchanged.
  virtual uint64_t Version() const noexcept { return 0; }
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo Info() const = 0;

  // Validates the batch against the cache's layout and prepares the step (work list, workspace). The only call of a
  // step that may throw. `plan`: null, or a plan of an earlier step whose memory is reused.
  virtual std::unique_ptr<Plan> MakePlan(const BatchShape& batch, std::unique_ptr<Plan> plan) = 0;

  // k, v: f32 [rows][kv_heads * head_dim], row stride `kv_stride` floats, after RoPE. Quantizes on write. MLA: k is
  // f32 [rows][head_dim + rope_dim], the latent followed by the RoPE channels; v is not read. Rows of several tokens
  // (formats::LayerShape::row_tokens): of k, the rows of tokens with which an entry ends are read.
  virtual void Append(Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept = 0;

  // The same with norms and RoPE of queries, in place, and of keys, which are left as they are: for layers of which
  // TransformsHeads is true, on a GPU, which has fewer launches then. False where an observer sees rows of Append.
  virtual bool TransformsHeads(int /*layer*/) const noexcept { return false; }
  virtual void AppendHeads(Plan& /*plan*/, int /*layer*/, const HeadRows& /*rows*/) noexcept {}

  // Encodes records of a KV cache group's later levels, by cache::AgeIndex, from the quantized one; null: not wanted.
  // Between steps, and only of backends on the host.
  virtual void EncodeLevels(int /*group*/, const uint8_t* /*quantized*/, std::span<uint8_t* const> /*later*/) noexcept {
  }

  // Chooses the tokens, or entries, of each row for the Run calls that follow: of those that it sees, the index_topk
  // with the largest scores, of equal ones the earlier, or all if there are no more. The score of a key k is the sum
  // over the layer's heads, in their order, of weight * max(<q, k>, 0); one that is not a number comes last. `layer`:
  // of keys without V. q: f32 [rows][heads * head_dim], row stride `q_stride` floats; weights: f32 [rows][heads].
  virtual void Select(Plan& /*plan*/, int /*layer*/, const float* /*q*/, int64_t /*q_stride*/,
                      const float* /*weights*/) noexcept {}
  // Positions that the step's last Select chose for a row, ascending; empty: all that it sees.
  virtual std::span<const int32_t> Selected(const Plan& /*plan*/, int64_t /*row*/) const noexcept { return {}; }

  // q: f32 [rows][heads * KeyDim()], row stride `q_stride` floats, after RoPE; out: f32 [rows][heads * head_dim],
  // dense. reader: the linear layer that alone reads `out`, and next: a GPU may pack it for it instead
  // (kernels::Ops::ActivateMul); or null.
  virtual void Run(Plan& plan, int layer, const float* q, int64_t q_stride, float* out,
                   const kernels::Linear* reader) noexcept = 0;
  void Run(Plan& plan, int layer, const float* q, int64_t q_stride, float* out) noexcept {
    Run(plan, layer, q, q_stride, out, nullptr);
  }

  // States of a recurrent layer that the step reads and writes.
  virtual cache::StateStep States(const Plan& /*plan*/, int /*layer*/) const noexcept { return {}; }
  // Makes the plan's States those that advance over the accepted drafts after the step: the first accepted[i] ones of
  // sequence i of the batch. Their rows are counted among the step's drafts.
  virtual void AcceptDrafts(Plan& /*plan*/, std::span<const int> /*accepted*/) const noexcept {}

  // Counters of a layer; thread-safe, also during a step. A GPU backend returns the counters of the last FetchCounts,
  // which synchronizes with the device and must be called by the thread that runs the steps.
  virtual AppendCounts Counts(int layer) const = 0;
  virtual void FetchCounts() {}
  // Scales of a layer as Append reads them.
  virtual const formats::LayerScales& Scales(int layer) const = 0;
};

struct BackendConfig {
  std::vector<AttentionSpec> layers;
  std::vector<formats::LayerScales> scales;  // per layer
  // Ranks that the pages of the pool are dealt to, each with as many heads (context_parallel.h); null: this one has
  // all.
  parallel::Communicator* ranks = nullptr;
};

}  // namespace kvanta::attention
