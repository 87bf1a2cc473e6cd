#include "models/blocks/indexer.h"

#include <cmath>

namespace kvanta::models {
namespace {

constexpr float kKeyEps = 1e-6F;  // of the keys' norm; the class's default

}  // namespace

Indexer::Indexer(const BlockSource& source, const std::string& module)
    : ops_(source.ops), indexer_(source.config.indexer), rope_dim_(source.config.mla.qk_rope_head_dim) {
  WeightReader& reader = source.reader;
  const int64_t hidden = source.config.hidden, head_dim = indexer_.head_dim;
  // Every rank selects for all heads of attention.
  to_queries_ = reader.Linear({{.module = module + "wq_b", .out = Width(), .whole = true}},
                              source.config.mla.q_lora_rank, false, {source.store, kInt16Activations});
  to_key_ = reader.Linear({{.module = module + "wk", .out = head_dim, .whole = true}}, hidden, false,
                          {source.store, kInt16Activations});
  to_weights_ = reader.Linear({{.module = module + "weights_proj", .out = indexer_.heads, .whole = true}}, hidden,
                              false, kernels::WeightType::kF32);
  norm_weight_ = reader.Vector(module + "k_norm.weight", head_dim);
  norm_bias_ = reader.Vector(module + "k_norm.bias", head_dim);
}

void Indexer::Place(Scratch& scratch, int64_t rows) noexcept {
  queries_ = scratch.Take(rows * Width());
  keys_ = scratch.Take(rows * indexer_.head_dim);
  weights_ = scratch.Take(rows * indexer_.heads);
}

void Indexer::Select(const AttentionStep& step, const float* x, const float* low) noexcept {
  const int64_t rows = step.rows, head_dim = indexer_.head_dim;
  to_key_->Forward(x, rows, keys_, head_dim);
  ops_.LayerNorm(keys_, head_dim, norm_weight_.as<float>(), norm_bias_.as<float>(), kKeyEps, rows, head_dim, keys_,
                 head_dim);
  Rotate(step, keys_, 1);
  step.backend->Append(*step.plan, step.index_layer, keys_, nullptr, head_dim);
  to_queries_->Forward(low, rows, queries_, Width());
  Rotate(step, queries_, indexer_.heads);
  to_weights_->Forward(x, rows, weights_, indexer_.heads);
  const double heads = indexer_.heads;
  ops_.Scale(weights_, static_cast<float>(1 / std::sqrt(heads * static_cast<double>(head_dim))), rows * indexer_.heads);
  step.backend->Select(*step.plan, step.index_layer, queries_, Width(), weights_);
}

void Indexer::Rotate(const AttentionStep& step, float* x, int heads) noexcept {
  ops_.Rope(x, int64_t{heads} * indexer_.head_dim, step.rows, heads, indexer_.head_dim, rope_dim_,
            indexer_.rope_interleave, step.rope_table, step.positions);
}

}  // namespace kvanta::models
