// Blocks of a decoder layer: an attention and an MLP, of several kinds. A block reads its weights when it is made, and
// computes in scratch memory that all blocks of a model share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "models/config/config.h"
#include "models/weights.h"

namespace kvanta::models {

// With weights in blocks, q, k, v and logits take 16-bit activations: the largest gain for the least work
// (docs/weights.md). So do the down projections of dense MLPs in the formats that amplify rounding.
inline constexpr bool kInt16Activations = true;

// Allocates parts of one piece of memory, each aligned to a cache line; without memory it only counts.
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
  // Scratch of a block that overlaps that of other blocks: they run one after the other.
  template <class Block>
  void OverlapScratch(Block& block, int64_t rows) noexcept {
    Scratch own(memory_);
    own.used_ = used_;
    block.Place(own, rows);
    overlapped_end_ = std::max(overlapped_end_, own.Used());
  }
  int64_t Used() const noexcept { return std::max(used_, overlapped_end_); }

 private:
  float* memory_;
  int64_t used_ = 0;
  int64_t overlapped_end_ = 0;
};

struct AttentionStep {
  int layer = 0;
  int index_layer = 0;                      // layer of the cache with the keys of its indexer, if it has one
  int entries_layer = 0, inputs_layer = 0;  // ... with its compressed entries, and the inputs of the next ones
  int64_t rows = 0;
  const int64_t* positions = nullptr;  // [rows]
  const RopeSpec* rope = nullptr;      // the layer's
  // Tables of keys and queries, f32 [positions][rotary_dim], cos | sin; null without rope.
  const float* rope_table = nullptr;
  const float* query_rope_table = nullptr;
  const float* query_scales = nullptr;  // factors of queries by position, f32 [positions]; null: none
  attention::Backend* backend = nullptr;
  attention::Plan* plan = nullptr;
};

class AttentionBlock {
 public:
  virtual ~AttentionBlock() = default;
  // Takes the scratch memory of a Forward of up to `rows` rows. Blocks overlap.
  virtual void Place(Scratch& scratch, int64_t rows) noexcept = 0;
  // The linear layer of Forward that reads x first (Ops::AddRmsNorm); null: another operation does.
  virtual const kernels::Linear* Reader() const noexcept { return nullptr; }
  // x: f32 [rows][hidden], normed -> out: f32 [rows][hidden], through the cache.
  virtual void Forward(const AttentionStep& step, const float* x, float* out) noexcept = 0;
  // Recurrent layers: advances states over accepted rows among the drafted ones of the last Forward, after
  // Backend::AcceptDrafts. step: its rows, positions and ropes are not read.
  virtual void AdvanceStates(const AttentionStep& /*step*/) noexcept {}
  // Attention sinks (attention::AttentionSpec): [heads], or none.
  virtual std::vector<float> Sinks() const { return {}; }
};

class MlpBlock {
 public:
  virtual ~MlpBlock() = default;
  virtual void Place(Scratch& scratch, int64_t rows) noexcept = 0;
  // As AttentionBlock's.
  virtual const kernels::Linear* Reader() const noexcept { return nullptr; }
  // The rows' tokens, before Forward: of experts that are chosen by token. Valid until then.
  virtual void SetTokens(const int32_t* /*tokens*/) noexcept {}
  // x: f32 [rows][hidden], normed -> out: f32 [rows][hidden].
  virtual void Forward(const float* x, int64_t rows, float* out) noexcept = 0;
};

// Arguments of the Read functions. All but `reader` outlive the block.
struct BlockSource {
  WeightReader& reader;
  kernels::Ops& ops;
  const ModelConfig& config;
  kernels::WeightType store;  // how matrices are kept
  parallel::Communicator& ranks;
  bool expert_parallel = false;  // ranks divide the experts of a layer instead of each expert
  int64_t max_draft_rows = 0;    // drafted rows of a step
};

// A linear layer of whose outputs each rank computes a part; all ranks get all of them.
class ColumnParallelLinear {
 public:
  // `read`: this rank's rows of the weight.
  ColumnParallelLinear(parallel::Communicator& ranks, std::unique_ptr<kernels::Linear> read, int64_t out)
      : ranks_(ranks), linear_(std::move(read)), columns_(ranks.PartitionOf(out)) {}

  void Place(Scratch& scratch, int64_t rows) noexcept {
    if (!ranks_.IsSingleRank()) part_ = scratch.Take(rows * linear_->Out());
  }
  const kernels::Linear* Reader() const noexcept { return linear_.get(); }
  // x: f32 [rows][in]; out: f32 [rows][out], dense.
  void Forward(const float* x, int64_t rows, float* out) noexcept {
    if (ranks_.IsSingleRank()) return linear_->Forward(x, rows, out, columns_.count);
    linear_->Forward(x, rows, part_, linear_->Out());
    ranks_.AllGatherColumns(part_, rows, columns_, out);
  }

 private:
  parallel::Communicator& ranks_;
  std::unique_ptr<kernels::Linear> linear_;
  parallel::Partition columns_;
  float* part_ = nullptr;  // [rows][this rank's columns]
};

// Columns of which each rank has computed a part: the whole ones.
class GatheredColumns {
 public:
  GatheredColumns(parallel::Communicator& ranks, int64_t count) : ranks_(ranks), columns_(ranks.PartitionOf(count)) {}

  int64_t Columns() const noexcept { return columns_.count; }

  void Place(Scratch& scratch, int64_t rows) noexcept {
    if (!ranks_.IsSingleRank()) whole_ = scratch.Take(rows * columns_.count);
  }
  // part: f32 [rows][this rank's columns], dense -> f32 [rows][all columns].
  const float* Gather(const float* part, int64_t rows) noexcept {
    if (ranks_.IsSingleRank()) return part;
    ranks_.AllGatherColumns(part, rows, columns_, whole_);
    return whole_;
  }

 private:
  parallel::Communicator& ranks_;
  parallel::Partition columns_;
  float* whole_ = nullptr;
};

// Grouped-query attention. `prefix`: of the layer's tensors, "model.layers.0.", here and below.
std::unique_ptr<AttentionBlock> ReadGroupedAttention(const BlockSource& source, const LayerSpec& spec,
                                                     const std::string& prefix);
// Multi-head latent attention (config.mla).
std::unique_ptr<AttentionBlock> ReadLatentAttention(const BlockSource& source, const LayerSpec& spec,
                                                    const std::string& prefix);
// Attention within a window and to compressed entries (config.compression).
std::unique_ptr<AttentionBlock> ReadCompressedAttention(const BlockSource& source, const LayerSpec& spec,
                                                        const std::string& prefix);
// The block of spec.recurrent in place of attention: one of those below.
std::unique_ptr<AttentionBlock> ReadRecurrent(const BlockSource& source, const LayerSpec& spec,
                                              const std::string& prefix);
std::unique_ptr<AttentionBlock> ReadGatedDeltaNet(const BlockSource& source, const std::string& prefix);
std::unique_ptr<AttentionBlock> ReadKimiDelta(const BlockSource& source, const std::string& prefix);
std::unique_ptr<AttentionBlock> ReadShortConv(const BlockSource& source, const std::string& prefix);
std::unique_ptr<AttentionBlock> ReadMamba2(const BlockSource& source, const std::string& prefix);

// The layer's MLP or mixture of experts: one of those below. `prefix`: of its tensors.
std::unique_ptr<MlpBlock> ReadMlp(const BlockSource& source, const LayerSpec& spec, const std::string& prefix);
struct GatedMlpShape {
  int64_t intermediate_size = 0;
  float limit = 0;           // of the activation (Ops::ActivateMul); 0: none
  bool limits_gate = false;  // as kernels::MoeConfig's
};
// down(activation(gate(x)) * up(x)), activation by config.mlp; `module`: "model.layers.0.mlp.".
std::unique_ptr<MlpBlock> ReadGatedMlp(const BlockSource& source, const std::string& module,
                                       const GatedMlpShape& shape);
// down(activation(up(x))) (config.mlp).
std::unique_ptr<MlpBlock> ReadUngatedMlp(const BlockSource& source, const std::string& module,
                                         int64_t intermediate_size);
// Mixture of experts (config.moe). `prefix`: of the layer's tensors, `module`: of the experts'.
std::unique_ptr<MlpBlock> ReadMoe(const BlockSource& source, const LayerSpec& spec, const std::string& prefix,
                                  const std::string& module);
// Both, side by side (config.mlp_beside_experts), with their norms. `prefix`: of the layer's tensors.
std::unique_ptr<MlpBlock> ReadMlpAndExperts(const BlockSource& source, const LayerSpec& spec,
                                            const std::string& prefix);

}  // namespace kvanta::models
