#include "models/blocks/indexer.h"

#include <cmath>

namespace kvanta::models {
namespace {

constexpr float kNormEps = 1e-6F;  // of the norms of keys and inputs; the class's default

}  // namespace

Indexer::Indexer(const BlockSource& source, const std::string& module)
    : ops_(source.ops),
      indexer_(source.config.indexer),
      rope_dim_(source.config.mla.qk_rope_head_dim),
      hidden_(source.config.hidden) {
  WeightReader& reader = source.reader;
  const MlaConfig& mla = source.config.mla;
  const int64_t head_dim = indexer_.head_dim;
  // Every rank selects for all heads of attention.
  to_queries_ =
      reader.Linear({{.module = module + "wq_b", .out = Width(), .whole = true}},
                    indexer_.norms_inputs ? hidden_ : mla.q_lora_rank, false, {source.store, kInt16Activations});
  to_key_ = reader.Linear({{.module = module + "wk", .out = head_dim, .whole = true}}, hidden_, false,
                          {source.store, kInt16Activations});
  to_weights_ = reader.Linear({{.module = module + "weights_proj", .out = indexer_.heads, .whole = true}}, hidden_,
                              false, kernels::WeightType::kF32);
  if (indexer_.norms_inputs) {
    input_norm_weight_ = reader.Vector(module + "q_input_norm.weight", hidden_);
    input_norm_bias_ = reader.Vector(module + "q_input_norm.bias", hidden_);
  }
  if (mla.log_query_scales) query_scales_ = HeadScales(source, module, indexer_.heads, 0, indexer_.heads);
  norm_weight_ = reader.Vector(module + "k_norm.weight", head_dim);
  norm_bias_ = reader.Vector(module + "k_norm.bias", head_dim);
}

void Indexer::Place(Scratch& scratch, int64_t rows) noexcept {
  if (indexer_.norms_inputs) normed_ = scratch.Take(rows * hidden_);
  if (query_scales_) query_scales_.Place(scratch, rows);
  queries_ = scratch.Take(rows * Width());
  keys_ = scratch.Take(rows * indexer_.head_dim);
  weights_ = scratch.Take(rows * indexer_.heads);
}

void Indexer::Select(const AttentionStep& step, const float* x, const float* low) noexcept {
  const int64_t rows = step.rows, head_dim = indexer_.head_dim;
  to_key_->Forward(x, rows, keys_, head_dim);
  ops_.LayerNorm(keys_, head_dim, norm_weight_.as<float>(), norm_bias_.as<float>(), kNormEps, rows, head_dim, keys_,
                 head_dim);
  Rotate(step, keys_, 1);
  step.backend->Append(*step.plan, step.index_layer, keys_, nullptr, head_dim);
  if (indexer_.norms_inputs) {
    ops_.LayerNorm(x, hidden_, input_norm_weight_.as<float>(), input_norm_bias_.as<float>(), kNormEps, rows, hidden_,
                   normed_, hidden_);
    low = normed_;
  }
  to_queries_->Forward(low, rows, queries_, Width());
  if (query_scales_) query_scales_.Multiply(ops_, step, queries_, indexer_.head_dim);
  Rotate(step, queries_, indexer_.heads);
  to_weights_->Forward(x, rows, weights_, indexer_.heads);
  const double heads = indexer_.heads;
  ops_.Scale(weights_, static_cast<float>(1 / std::sqrt(heads * static_cast<double>(head_dim))), rows * indexer_.heads);
  step.backend->Select(*step.plan, step.index_layer, queries_, Width(), weights_);
}

void Indexer::Rotate(const AttentionStep& step, float* x, int heads) noexcept {
  if (step.rope_table == nullptr) return;
  ops_.Rope(x, int64_t{heads} * indexer_.head_dim, step.rows, heads, indexer_.head_dim, rope_dim_,
            {.interleaved = indexer_.rope_interleave}, step.rope_table, step.positions);
}

}  // namespace kvanta::models
