// Attention of DeepSeek V4: K and V of a token are one row for all heads, whose last channels are rotated, and which
// queries read within a window; some layers also read compressed entries of the tokens before (compressor.h). The
// rotation of values is undone in the output, which groups of heads project to fewer channels each. transformers:
// DeepseekV4Attention in models/deepseek_v4/modeling_deepseek_v4.py.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <vector>

#include "models/blocks/compressor.h"
#include "models/blocks/layer_blocks.h"
#include "models/blocks/norm.h"

namespace kvanta::models {
namespace {

class CompressedAttention final : public AttentionBlock {
 public:
  CompressedAttention(const BlockSource& source, const LayerSpec& spec, const std::string& prefix)
      : ops_(source.ops),
        config_(source.config),
        heads_(spec.heads / source.ranks.Size()),
        head_dim_(spec.head_dim),
        gathered_(source.ranks, int64_t{spec.heads} * spec.head_dim) {
    WeightReader& reader = source.reader;
    const std::string module = fmt::format("{}{}.", prefix, config_.names.attention);
    const int64_t hidden = config_.hidden, low = config_.mla.q_lora_rank;
    const kernels::LinearKind kind{source.store, kInt16Activations};
    to_low_ = reader.Linear({{.module = module + "wq_a", .out = low, .whole = true}}, hidden, false, kind);
    low_norm_ = reader.Vector(module + "q_norm.weight", low);
    to_queries_ = reader.Linear({{module + "wq_b", gathered_.Columns()}}, low, false, kind);
    query_norm_ = Filled(reader.device(), head_dim_, 1);
    to_kv_ = reader.Linear({{.module = module + "wkv", .out = head_dim_, .whole = true}}, hidden, false, kind);
    // transformers saves another name than the published one.
    const char* norm = reader.Has(module + "kv_norm.weight") ? "kv_norm.weight" : "norm.weight";
    kv_norm_ = reader.Vector(module + norm, head_dim_);
    const std::vector<float> sinks = reader.KeptValues(module + "attn_sink", spec.heads);
    const auto first = sinks.begin() + int64_t{source.ranks.Rank()} * heads_;
    sinks_.assign(first, first + heads_);
    if (spec.row_tokens != 1) compressor_.emplace(source, spec, module);
    const int64_t groups = config_.compression.o_groups, rank = config_.compression.o_lora_rank;
    for (int64_t group = 0; group < groups; ++group) {
      const StackedWeight rows{
          .module = module + "wo_a", .out = rank, .tensor_out = groups * rank, .tensor_first = group * rank};
      auto linear = reader.Linear({rows}, gathered_.Columns() / groups, false, source.store);
      groups_.emplace_back(source.ranks, std::move(linear), rank);
    }
    auto out = reader.Linear({{module + "wo_b", hidden}}, groups * rank, false, source.store);
    out_.emplace(source.ranks, std::move(out), hidden);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    const int64_t groups = std::ssize(groups_);
    low_ = scratch.Take(rows * config_.mla.q_lora_rank);
    kv_ = scratch.Take(rows * head_dim_);
    queries_ = scratch.Take(rows * Width());
    attended_ = scratch.Take(rows * Width());
    part_ = scratch.Take(rows * gathered_.Columns() / groups);
    group_out_ = scratch.Take(rows * config_.compression.o_lora_rank);
    grouped_ = scratch.Take(rows * groups * config_.compression.o_lora_rank);
    gathered_.Place(scratch, rows);
    for (ColumnParallelLinear& group : groups_) group.Place(scratch, rows);
    out_->Place(scratch, rows);
    if (compressor_) compressor_->Place(scratch, rows);
  }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    const int64_t rows = step.rows, low = config_.mla.q_lora_rank;
    const auto eps = static_cast<float>(config_.rms_eps);
    to_low_->Forward(x, rows, low_, low);
    ops_.RmsNorm(low_, low, low_norm_.as<float>(), eps, rows, low, low_, low);
    to_queries_->Forward(low_, rows, queries_, Width());
    ops_.RmsNorm(queries_, head_dim_, query_norm_.as<float>(), eps, rows * heads_, head_dim_, queries_, head_dim_);
    Rotate(step, heads_, false, queries_);
    to_kv_->Forward(x, rows, kv_, head_dim_);
    ops_.RmsNorm(kv_, head_dim_, kv_norm_.as<float>(), eps, rows, head_dim_, kv_, head_dim_);
    Rotate(step, 1, false, kv_);
    step.backend->Append(*step.plan, step.layer, kv_, nullptr, head_dim_);
    if (compressor_) compressor_->Forward(step, x, low_);
    step.backend->Run(*step.plan, step.layer, queries_, Width(), attended_);
    Rotate(step, heads_, true, attended_);
    Project(rows, out);
  }

  void AdvanceStates(const AttentionStep& step) noexcept override {
    if (compressor_) compressor_->AdvanceStates(step);
  }

  std::vector<float> Sinks() const override { return sinks_; }

 private:
  int64_t Width() const { return int64_t{heads_} * head_dim_; }

  // Rotates the last channels of each head, or, `inverse`, rotates them back.
  void Rotate(const AttentionStep& step, int heads, bool inverse, float* x) noexcept {
    const int rotary_dim = step.rope->rotary_dim;
    ops_.Rope(x + head_dim_ - rotary_dim, int64_t{heads} * head_dim_, step.rows, heads, head_dim_, rotary_dim,
              {.interleaved = true, .inverse = inverse}, step.rope_table, step.positions);
  }

  void Project(int64_t rows, float* out) noexcept {
    const int64_t rank = config_.compression.o_lora_rank, stride = std::ssize(groups_) * rank;
    const float* attended = gathered_.Gather(attended_, rows);
    const int64_t width = gathered_.Columns(), in = width / std::ssize(groups_);
    for (size_t group = 0; group < groups_.size(); ++group) {
      const auto at = static_cast<int64_t>(group);
      ops_.Copy(attended + at * in, width, rows, in, part_, in);
      groups_[group].Forward(part_, rows, group_out_);
      ops_.Copy(group_out_, rank, rows, rank, grouped_ + at * rank, stride);
    }
    out_->Forward(grouped_, rows, out);
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const int heads_, head_dim_;                            // heads: this rank's; rows of the cache are every rank's
  std::unique_ptr<kernels::Linear> to_low_, to_queries_;  // hidden -> q_lora_rank -> heads * head_dim
  std::unique_ptr<kernels::Linear> to_kv_;                // hidden -> head_dim
  Buffer low_norm_, kv_norm_, query_norm_;                // f32; the last one all 1, [head_dim]
  std::vector<float> sinks_;                              // [heads]
  GatheredColumns gathered_;                              // all ranks' heads * head_dim
  std::optional<Compressor> compressor_;
  std::vector<ColumnParallelLinear> groups_;  // heads of a group -> o_lora_rank
  std::optional<ColumnParallelLinear> out_;   // groups * o_lora_rank -> hidden
  // Scratch, f32 [rows][...]:
  float* low_ = nullptr;
  float* kv_ = nullptr;
  float* queries_ = nullptr;
  float* attended_ = nullptr;
  float* part_ = nullptr;       // heads of a group
  float* group_out_ = nullptr;  // o_lora_rank
  float* grouped_ = nullptr;    // outputs of all groups
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadCompressedAttention(const BlockSource& source, const LayerSpec& spec,
                                                        const std::string& prefix) {
  return std::make_unique<CompressedAttention>(source, spec, prefix);
}

}  // namespace kvanta::models
