// Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1) with absorbed weights: K = W_UK c and V = W_UV c of
// a token's latent c are never computed. Queries are projected by W_UK into the latents' space, where attention runs on
// the latents and on the rotated channels that all heads share; its output is a latent, which W_UV projects to values.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "models/blocks/head_scales.h"
#include "models/blocks/indexer.h"
#include "models/blocks/layer_blocks.h"
#include "models/blocks/norm.h"

namespace kvanta::models {
namespace {

// Rows [first, first + count) of a matrix [out][in].
std::vector<float> TakeRows(const std::vector<float>& rows, int64_t in, int64_t first, int64_t count) {
  return {rows.begin() + first * in, rows.begin() + (first + count) * in};
}

std::vector<float> Transposed(const std::vector<float>& matrix, int64_t out, int64_t in) {
  std::vector<float> result(matrix.size());
  for (int64_t row = 0; row < out; ++row) {
    for (int64_t column = 0; column < in; ++column) result[column * out + row] = matrix[row * in + column];
  }
  return result;
}

// One linear layer per head, each on its head's part of the rows.
class HeadLayers {
 public:
  // `part`: scratch, f32 [rows][in].
  void Forward(kernels::Ops& ops, const kernels::MemberRows& x, int64_t rows, const kernels::MemberOutputs& y,
               float* part) const noexcept {
    if (group_) return group_->Forward(x, rows, y);
    for (size_t head = 0; head < layers_.size(); ++head) {
      const auto at = static_cast<int64_t>(head);
      const int64_t in = layers_[head]->In();
      ops.Copy(x.first + at * x.member, x.stride, rows, in, part, in);
      layers_[head]->Forward(part, rows, y.first + at * y.member, y.stride);
    }
  }

  void Add(std::unique_ptr<kernels::Linear> layer) { layers_.push_back(std::move(layer)); }
  void Close(kernels::Ops& ops) {
    if (!ops.OnHost()) group_ = ops.MakeGroup(std::move(layers_));
  }

 private:
  std::vector<std::unique_ptr<kernels::Linear>> layers_;  // the host runs them one by one
  std::unique_ptr<kernels::LinearGroup> group_;           // a device runs them in few launches
};

class LatentAttention final : public AttentionBlock {
 public:
  LatentAttention(const BlockSource& source, const LayerSpec& spec, const std::string& prefix)
      : ops_(source.ops),
        config_(source.config),
        mla_(source.config.mla),
        heads_(source.config.heads / source.ranks.Size()),
        has_rope_channels_(mla_.keeps_rope_channels || spec.rope.rotary_dim != 0),
        latent_eps_(static_cast<float>(mla_.latent_eps)),
        gathered_(source.ranks, ValuesOfAllHeads()) {
    const std::string module = fmt::format("{}{}.", prefix, config_.names.attention);
    ReadQueries(source, module);
    ReadLatents(source, module);
    ReadHeads(source, module);
    if (!has_rope_channels_) zeros_ = Filled(ops_.device(), mla_.qk_rope_head_dim, 0);
    if (mla_.log_query_scales) {
      query_scales_ = HeadScales(source, module, config_.heads, heads_ * source.ranks.Rank(), heads_);
    }
    if (spec.selection == TokenSelection::kIndexer) indexer_.emplace(source, module + "indexer.");
    if (config_.attn_output_gate == OutputGate::kPerHead) {
      gate_ = source.reader.Linear({{module + std::string(config_.names.output_gate), config_.heads}}, config_.hidden,
                                   false, source.store);
    }
    out_.emplace(source.ranks,
                 source.reader.Linear({{module + std::string(config_.names.attention_out), config_.hidden}},
                                      ValuesOfAllHeads(), config_.o_bias, source.store),
                 config_.hidden);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    low_ = scratch.Take(rows * mla_.q_lora_rank);
    projected_ = scratch.Take(rows * heads_ * HeadDim());
    latents_ = scratch.Take(rows * KeyDim());
    queries_ = scratch.Take(rows * heads_ * KeyDim());
    attended_ = scratch.Take(rows * heads_ * mla_.kv_lora_rank);
    part_ = scratch.Take(rows * std::max(mla_.kv_lora_rank, NopeDim()));
    values_ = scratch.Take(rows * heads_ * mla_.v_head_dim);
    if (gate_) gates_ = scratch.Take(rows * heads_);
    if (query_scales_) query_scales_.Place(scratch, rows);
    gathered_.Place(scratch, rows);
    out_->Place(scratch, rows);
    if (indexer_) indexer_->Place(scratch, rows);
  }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    const int64_t rows = step.rows, rank = mla_.kv_lora_rank;
    ProjectLatents(step, x);
    ProjectQueries(step, x);
    step.backend->Append(*step.plan, step.layer, latents_, nullptr, KeyDim());
    if (indexer_) indexer_->Select(step, x, low_);
    step.backend->Run(*step.plan, step.layer, queries_, heads_ * KeyDim(), attended_);
    const int64_t value = mla_.v_head_dim;
    from_latent_.Forward(ops_, {attended_, heads_ * rank, rank}, rows, {values_, heads_ * value, value}, part_);
    if (gate_) {
      gate_->Forward(x, rows, gates_, heads_);
      ops_.MulGate(config_.attn_gate_function, values_, heads_ * value, gates_, heads_, rows, heads_ * value, value);
    }
    out_->Forward(gathered_.Gather(values_, rows), rows, out);
  }

 private:
  int64_t HeadDim() const {
    return int64_t{mla_.qk_nope_head_dim} + mla_.qk_rope_head_dim;
  }  // channels of a projected query
  // Channels of a head's query and key without rotation, and those with.
  int NopeDim() const { return mla_.qk_nope_head_dim + mla_.qk_rope_head_dim - RopeDim(); }
  int RopeDim() const { return has_rope_channels_ ? mla_.qk_rope_head_dim : 0; }
  int64_t KeyDim() const { return int64_t{mla_.kv_lora_rank} + mla_.qk_rope_head_dim; }
  int64_t ValuesOfAllHeads() const { return int64_t{config_.heads} * mla_.v_head_dim; }

  // A matrix of `heads` heads, each of `first` rows and then those that are rotated.
  StackedWeight RotatedHeads(const std::string& name, int64_t heads, int64_t first) const {
    return {.module = name,
            .out = heads * (first + RopeDim()),
            .interleaved_heads = mla_.rope_interleave && has_rope_channels_ ? heads : 0,
            .interleaved_first = first};
  }

  void ReadQueries(const BlockSource& source, const std::string& module) {
    const int64_t in = mla_.q_lora_rank != 0 ? mla_.q_lora_rank : config_.hidden;
    if (mla_.q_lora_rank != 0) {
      to_low_ = source.reader.Linear({{.module = module + "q_a_proj", .out = mla_.q_lora_rank, .whole = true}},
                                     config_.hidden, config_.qkv_bias, {source.store, kInt16Activations});
      low_norm_ = source.reader.Vector(module + "q_a_layernorm.weight", mla_.q_lora_rank);
    }
    const std::string name = module + (mla_.q_lora_rank != 0 ? "q_b_proj" : std::string(config_.names.latent_q));
    to_queries_ = source.reader.Linear({RotatedHeads(name, config_.heads, NopeDim())}, in, false,
                                       {source.store, kInt16Activations});
  }

  void ReadLatents(const BlockSource& source, const std::string& module) {
    const TensorNames& names = config_.names;
    StackedWeight weight = RotatedHeads(module + std::string(names.kv_a), 1, mla_.kv_lora_rank);
    weight.whole = true;
    to_latent_ = source.reader.Linear({weight}, config_.hidden, config_.qkv_bias, {source.store, kInt16Activations});
    latent_norm_ = source.reader.Vector(fmt::format("{}{}.weight", module, names.kv_a_norm), mla_.kv_lora_rank);
  }

  void ReadHeads(const BlockSource& source, const std::string& module) {
    const std::string name = module + std::string(config_.names.kv_b);
    const int64_t rank = mla_.kv_lora_rank, nope = NopeDim(), value = mla_.v_head_dim;
    if (source.reader.Has(module + "k_b_proj.0.weight")) {  // GGUF files: transposed and split by head
      for (int head = 0; head < config_.heads; ++head) {
        const std::string k_b = fmt::format("{}k_b_proj.{}", module, head),
                          v_b = fmt::format("{}v_b_proj.{}", module, head);
        if (head / heads_ != source.ranks.Rank()) {
          for (const std::string& weight : {k_b, v_b}) source.reader.SkipTensors(weight + ".");
          continue;
        }
        to_latent_space_.Add(source.reader.Linear({{.module = k_b, .out = rank, .whole = true}}, nope, false,
                                                  {source.store, kInt16Activations}));
        from_latent_.Add(
            source.reader.Linear({{.module = v_b, .out = value, .whole = true}}, rank, false, source.store));
      }
      to_latent_space_.Close(ops_);
      from_latent_.Close(ops_);
      return;
    }
    const std::vector<float> both =
        source.reader.Matrix(name + ".weight", config_.heads * (nope + value), rank, source.store);
    for (int64_t head = 0; head < heads_; ++head) {
      const int64_t first = head * (nope + value);
      to_latent_space_.Add(source.reader.Pack(Transposed(TakeRows(both, rank, first, nope), nope, rank), rank, nope, {},
                                              {source.store, kInt16Activations}, name));
      from_latent_.Add(
          source.reader.Pack(TakeRows(both, rank, first + nope, value), value, rank, {}, source.store, name));
    }
    to_latent_space_.Close(ops_);
    from_latent_.Close(ops_);
  }

  void ProjectLatents(const AttentionStep& step, const float* x) noexcept {
    to_latent_->Forward(x, step.rows, latents_, KeyDim());
    ops_.RmsNorm(latents_, KeyDim(), latent_norm_.as<float>(), latent_eps_, step.rows, mla_.kv_lora_rank, latents_,
                 KeyDim());
    if (!has_rope_channels_) {
      ops_.Copy(zeros_.as<float>(), 0, step.rows, mla_.qk_rope_head_dim, latents_ + mla_.kv_lora_rank, KeyDim());
    }
    if (step.rope_table == nullptr) return;
    ops_.Rope(latents_ + mla_.kv_lora_rank, KeyDim(), step.rows, 1, mla_.qk_rope_head_dim, mla_.qk_rope_head_dim, {},
              step.rope_table, step.positions);
  }

  void ProjectQueries(const AttentionStep& step, const float* x) noexcept {
    const int64_t rows = step.rows, width = heads_ * HeadDim(), stride = heads_ * KeyDim();
    if (to_low_) {
      to_low_->Forward(x, rows, low_, mla_.q_lora_rank);
      ops_.RmsNorm(low_, mla_.q_lora_rank, low_norm_.as<float>(), latent_eps_, rows, mla_.q_lora_rank, low_,
                   mla_.q_lora_rank);
      x = low_;
    }
    to_queries_->Forward(x, rows, projected_, width);
    to_latent_space_.Forward(ops_, {projected_, width, HeadDim()}, rows, {queries_, stride, KeyDim()}, part_);
    const float* rotated = has_rope_channels_ ? projected_ + NopeDim() : zeros_.as<float>();
    ops_.Copy(rotated, has_rope_channels_ ? HeadDim() : 0, rows * heads_, mla_.qk_rope_head_dim,
              queries_ + mla_.kv_lora_rank, KeyDim());
    if (query_scales_) query_scales_.Multiply(ops_, step, queries_, KeyDim());
    if (step.rope_table == nullptr) return;
    ops_.Rope(queries_ + mla_.kv_lora_rank, stride, rows, heads_, static_cast<int>(KeyDim()), mla_.qk_rope_head_dim, {},
              step.query_rope_table, step.positions);
    if (step.query_scales != nullptr && !query_scales_) {
      ops_.ScaleRows(queries_, stride, rows, stride, step.query_scales, step.positions);
    }
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const MlaConfig& mla_;
  const int heads_;               // this rank's; latents are every rank's
  const bool has_rope_channels_;  // else zeros are in their place in the cache
  const float latent_eps_;
  Buffer zeros_;                                 // f32 [qk_rope_head_dim], in the place of channels that a layer lacks
  HeadScales query_scales_;                      // may be none
  std::unique_ptr<kernels::Linear> to_low_;      // hidden -> q_lora_rank; null where queries are projected at once
  Buffer low_norm_;                              // f32 [q_lora_rank]
  std::unique_ptr<kernels::Linear> to_queries_;  // -> heads * (nope | rope)
  std::unique_ptr<kernels::Linear> to_latent_;   // hidden -> rank | rope
  Buffer latent_norm_;                           // f32 [rank]
  HeadLayers to_latent_space_;                   // nope -> rank: W_UK transposed
  HeadLayers from_latent_;                       // rank -> value: W_UV
  std::unique_ptr<kernels::Linear> gate_;        // hidden -> heads; null: none
  std::optional<Indexer> indexer_;               // of layers that select tokens
  GatheredColumns gathered_;                     // all ranks' heads * value
  std::optional<ColumnParallelLinear> out_;      // all ranks' heads * value -> hidden
  // f32 [rows][...]:
  float* low_ = nullptr;        // q_lora_rank
  float* projected_ = nullptr;  // heads * HeadDim()
  float* latents_ = nullptr;    // KeyDim()
  float* queries_ = nullptr;    // heads * KeyDim()
  float* attended_ = nullptr;   // heads * rank
  float* part_ = nullptr;       // one head's rows, dense
  float* values_ = nullptr;     // heads * v_head_dim
  float* gates_ = nullptr;      // heads, of gate_
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadLatentAttention(const BlockSource& source, const LayerSpec& spec,
                                                    const std::string& prefix) {
  return std::make_unique<LatentAttention>(source, spec, prefix);
}

}  // namespace kvanta::models
