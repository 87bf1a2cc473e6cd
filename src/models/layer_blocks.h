// What a decoder's layers are composed of: an attention and an MLP each, of several kinds. A block reads its weights
// when it is made, and computes in scratch that all blocks of a model share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "attention/backend.h"
#include "models/config.h"
#include "models/weights.h"

namespace kvanta::models {

// Where weights are blocks, q, k, v and logits take activations of 16 bits: most for the least work (docs/weights.md).
inline constexpr bool kInt16Activations = true;

// Hands out parts of one piece of memory, each on a cache line; without memory it only counts.
class Scratch {
 public:
  explicit Scratch(float* memory = nullptr) : memory_(memory) {}

  float* Take(int64_t floats) noexcept {
    constexpr int64_t kLine = 16;  // floats of 64 bytes
    used_ = Used();
    float* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (floats + kLine - 1) / kLine * kLine;
    return part;
  }
  // For blocks that compute one after the other: each gets the memory behind what is taken, the same as the others.
  template <class Block>
  void OverlapScratch(Block& block, int64_t rows) noexcept {
    Scratch own(memory_);
    own.used_ = used_;
    block.Place(own, rows);
    end_of_turns_ = std::max(end_of_turns_, own.Used());
  }
  int64_t Used() const noexcept { return std::max(used_, end_of_turns_); }

 private:
  float* memory_;
  int64_t used_ = 0;
  int64_t end_of_turns_ = 0;
};

struct AttentionStep {
  int layer = 0;
  int64_t rows = 0;
  const int64_t* positions = nullptr;  // [rows]
  const float* rope_table = nullptr;   // f32 [positions][rotary_dim], cos | sin
  attention::Backend* backend = nullptr;
  attention::Plan* plan = nullptr;
};

class AttentionBlock {
 public:
  virtual ~AttentionBlock() = default;
  // Takes what Forward of up to `rows` rows computes in. Other blocks take the same memory.
  virtual void Place(Scratch& scratch, int64_t rows) noexcept = 0;
  // x: f32 [rows][hidden], normed -> out: f32 [rows][hidden], through the cache.
  virtual void Forward(const AttentionStep& step, const float* x, float* out) noexcept = 0;
};

class MlpBlock {
 public:
  virtual ~MlpBlock() = default;
  virtual void Place(Scratch& scratch, int64_t rows) noexcept = 0;
  // x: f32 [rows][hidden], normed -> out: f32 [rows][hidden].
  virtual void Forward(const float* x, int64_t rows, float* out) noexcept = 0;
};

// What a block is made of and for; it outlives the block but for `reader`.
struct BlockSource {
  WeightReader& reader;
  kernels::Ops& ops;
  const ModelConfig& config;
  kernels::WeightType store;  // how matrices are kept
};

// `prefix`: of the layer's tensors, "model.layers.0.".

// Queries in groups that share a K and a V head: Llama, Mistral, Qwen2, Qwen3.
std::unique_ptr<AttentionBlock> ReadGroupedAttention(const BlockSource& source, const std::string& prefix);
// One latent for all heads: MLA (config.mla).
std::unique_ptr<AttentionBlock> ReadLatentAttention(const BlockSource& source, const std::string& prefix);

// down(silu(gate(x)) * up(x)) of `ffn` channels; `module`: "model.layers.0.mlp.".
std::unique_ptr<MlpBlock> ReadGatedMlp(const BlockSource& source, const std::string& module, int64_t intermediate_size,
                                       bool bias);
// Experts that a router chooses for each row, beside one that all rows pass (config.moe).
std::unique_ptr<MlpBlock> ReadMoe(const BlockSource& source, const std::string& module);

}  // namespace kvanta::models
