// The contract of an attention backend: Info / MakePlan / Append / Run. docs/engine-contract.md is normative.
//
// One plan per step describes every sequence of the batch; then, layer by layer, Append writes the new tokens' K and V
// into the cache (quantizing what closes) and Run attends. A row's output depends only on its own position and the
// bytes it reads: never on chunking, batch, prefix hits, or the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/block_table.h"
#include "cache/page_pool.h"
#include "cache/visibility.h"
#include "formats/scheme.h"

namespace kvanta::attention {

// What a layer's attention computes; fixed for a model.
struct AttentionSpec {
  int heads = 0;  // query heads; a multiple of kv_heads
  int kv_heads = 0;
  int head_dim = 0;         // 8..256, a multiple of 8; the rank of latents (MLA): 8..512
  int rope_dim = 0;         // 0: K and V are apart; else both are one latent, and a key has this many channels more
  float softmax_scale = 0;  // usually 1/sqrt(head_dim)
  float softcap = 0;        // 0: none; else logits = softcap * tanh(logits / softcap)
  cache::Visibility visibility = {};

  int KeyDim() const noexcept { return head_dim + rope_dim; }
};

// One sequence's part of a step: `tokens` new positions [start, start + tokens), whose pages all exist.
struct SequenceSpan {
  int64_t start = 0;                   // tokens already in the cache
  int tokens = 0;                      // new tokens, >= 1
  cache::BlockTables pages = nullptr;  // [KV cache group][ceil((start + tokens) / page_size)], valid during the step
};

struct BatchShape {
  std::span<const SequenceSpan> sequences;  // rows of q, k, v are concatenated in this order
  // Above 0: what Append and Run launch is to be good for any step of up to so many sequences, of one token each, as
  // these are (Plan::Version).
  int64_t bucket = 0;
};

// Values that saturated or were NaN while quantizing, since the start, and blocks (or rows, where a row has one scale)
// whose scale is zero, so that they are read as zeros. Blocks are those of symmetric formats whose rows stand alone.
struct SideCounts : formats::EncodeCounts {
  int64_t blocks = 0, zero_blocks = 0;
};
struct AppendCounts {
  SideCounts k;
  SideCounts v;
};

struct BackendInfo {
  std::string name;  // "cpu-amx", "cpu-avx512", "cpu-avx2", "cpu-portable", "reference", "cuda-sm90"
  std::vector<formats::ElementType> codes;  // codes it can read and write
};

// Opaque; made by MakePlan of the same backend; reused across steps to keep its memory.
class Plan {
 public:
  virtual ~Plan() = default;
  // Of a GPU's: launches that were recorded (kernels::Ops::Record) with a plan of some bucket compute what they would
  // for its later steps of that bucket, for as long as this stays the same.
  virtual uint64_t Version() const noexcept { return 0; }
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo Info() const = 0;

  // Validates the batch against the cache's layout and prepares the step (work list, workspace). May throw; everything
  // after it is noexcept. `plan` may be null or a plan of an earlier step, whose memory is reused.
  virtual std::unique_ptr<Plan> MakePlan(const BatchShape& batch, std::unique_ptr<Plan> plan) = 0;

  // k, v: f32 [rows][kv_heads * head_dim], row stride `kv_stride` floats, after RoPE. Quantizes on write. Of latents, k
  // is f32 [rows][head_dim + rope_dim], the latent and the rotated channels, and v is not read.
  virtual void Append(Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept = 0;

  // q: f32 [rows][heads * KeyDim()], row stride `q_stride` floats, after RoPE; out: f32 [rows][heads * head_dim],
  // dense.
  virtual void Run(Plan& plan, int layer, const float* q, int64_t q_stride, float* out) noexcept = 0;

  // From any thread, during a step, too. A GPU's are those of the last FetchCounts, which waits for it and is for the
  // thread that runs the steps.
  virtual AppendCounts Counts(int layer) const = 0;
  virtual void FetchCounts() {}
  // The scales that Append uses, read back from where it reads them.
  virtual const formats::LayerScales& Scales(int layer) const = 0;
};

struct BackendConfig {
  std::vector<AttentionSpec> layers;
  std::vector<formats::LayerScales> scales;  // per layer
};

}  // namespace kvanta::attention
