#include "models/blocks/compressor.h"

#include <array>
#include <cmath>

#include "models/blocks/recurrent_weights.h"

namespace kvanta::models {
namespace {

constexpr int64_t kFloatsOfInteger = sizeof(int64_t) / sizeof(float);

}  // namespace

Compressor::Compressor(const BlockSource& source, const LayerSpec& spec, const std::string& module)
    : ops_(source.ops),
      config_(source.config),
      shape_(source.config.Compressor(spec)),
      drafts_(source.ops.device(), source.max_draft_rows, shape_.InputWidth()),
      draft_positions_(source.ops.device(), source.max_draft_rows, kFloatsOfInteger) {
  WeightReader& reader = source.reader;
  const int64_t hidden = config_.hidden, series = shape_.Series();
  const std::string own = module + "compressor.", indexer = module + "indexer.", keys = indexer + "compressor.";
  const auto part = [&](const std::string& name, int64_t channels) {
    return StackedWeight{.module = name, .out = series * channels, .whole = true};
  };
  std::vector<StackedWeight> inputs = {part(own + "wkv", shape_.entry_dim), part(own + "wgate", shape_.entry_dim)};
  const auto read_bias = [&](const std::string& name, int64_t channels) {
    return Upload(source, ReadElements(source, name, std::array{int64_t{shape_.row_tokens}, series * channels}));
  };
  entry_bias_ = read_bias(own + "ape", shape_.entry_dim);
  entry_norm_ = reader.Vector(own + "norm.weight", shape_.entry_dim);
  if (shape_.key_dim != 0) {
    inputs.push_back(part(keys + "wkv", shape_.key_dim));
    inputs.push_back(part(keys + "wgate", shape_.key_dim));
    key_bias_ = read_bias(keys + "ape", shape_.key_dim);
    key_norm_ = reader.Vector(keys + "norm.weight", shape_.key_dim);
    to_queries_ = reader.Linear(
        {{.module = indexer + "wq_b", .out = int64_t{config_.indexer.heads} * shape_.key_dim, .whole = true}},
        config_.mla.q_lora_rank, false, {source.store, kInt16Activations});
    to_weights_ = reader.Linear({{.module = indexer + "weights_proj", .out = config_.indexer.heads, .whole = true}},
                                hidden, false, kernels::WeightType::kF32);
  }
  to_inputs_ = reader.Linear(inputs, hidden, false, {source.store, kInt16Activations});
}

void Compressor::Place(Scratch& scratch, int64_t rows) noexcept {
  inputs_ = scratch.Take(rows * shape_.InputWidth());
  entries_ = scratch.Take(rows * shape_.entry_dim);
  keys_ = scratch.Take(rows * shape_.key_dim);
  queries_ = shape_.key_dim == 0 ? nullptr : scratch.Take(rows * config_.indexer.heads * shape_.key_dim);
  weights_ = scratch.Take(rows * config_.indexer.heads);
}

void Compressor::Forward(const AttentionStep& step, const float* x, const float* low) noexcept {
  const cache::StateStep states = step.backend->States(*step.plan, step.inputs_layer);
  to_inputs_->Forward(x, step.rows, inputs_, shape_.InputWidth());
  ops_.Compress({.shape = shape_,
                 .inputs = inputs_,
                 .positions = step.positions,
                 .rows = step.rows,
                 .entry_bias = entry_bias_.as<float>(),
                 .key_bias = key_bias_.as<float>(),
                 .states = states,
                 .entries = entries_,
                 .keys = keys_});
  inputs_layer_ = step.inputs_layer;
  drafts_.Keep(ops_, states, inputs_, shape_.InputWidth(), shape_.InputWidth(), 0);
  // Rows are copied as they are, whatever their bits mean.
  draft_positions_.Keep(ops_, states, reinterpret_cast<const float*>(step.positions), kFloatsOfInteger,
                        kFloatsOfInteger, 0);
  Finish(step, entry_norm_, shape_.entry_dim, entries_);
  step.backend->Append(*step.plan, step.entries_layer, entries_, nullptr, shape_.entry_dim);
  if (!to_queries_) return;
  Finish(step, key_norm_, shape_.key_dim, keys_);
  step.backend->Append(*step.plan, step.index_layer, keys_, nullptr, shape_.key_dim);
  Select(step, x, low);
}

void Compressor::AdvanceStates(const AttentionStep& step) noexcept {
  const cache::StateStep states = step.backend->States(*step.plan, inputs_layer_);
  ops_.Compress({.shape = shape_,
                 .inputs = drafts_.Rows(),
                 .positions = reinterpret_cast<const int64_t*>(draft_positions_.Rows()),
                 .states = states});
}

// Norm and rope of the entries, or of their keys. Rows in which none ends are not read later.
void Compressor::Finish(const AttentionStep& step, const Buffer& norm, int width, float* rows) noexcept {
  const int rotary_dim = config_.compression.rotary_dim;
  ops_.RmsNorm(rows, width, norm.as<float>(), static_cast<float>(config_.rms_eps), step.rows, width, rows, width);
  ops_.Rope(rows + width - rotary_dim, width, step.rows, 1, width, rotary_dim,
            {.interleaved = true, .row_tokens = shape_.row_tokens}, step.rope_table, step.positions);
}

void Compressor::Select(const AttentionStep& step, const float* x, const float* low) noexcept {
  const int64_t rows = step.rows, heads = config_.indexer.heads, width = heads * shape_.key_dim;
  const int rotary_dim = config_.compression.rotary_dim;
  to_queries_->Forward(low, rows, queries_, width);
  ops_.Rope(queries_ + shape_.key_dim - rotary_dim, width, rows, static_cast<int>(heads), shape_.key_dim, rotary_dim,
            {.interleaved = true}, step.rope_table, step.positions);
  to_weights_->Forward(x, rows, weights_, heads);
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(width)));
  ops_.Scale(weights_, factor, rows * heads);
  step.backend->Select(*step.plan, step.index_layer, queries_, width, weights_);
}

}  // namespace kvanta::models
