#include "models/blocks/compressor.h"

#include <array>
#include <cmath>

#include "kernels/compression/cpu/compressor.h"
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
      draft_positions_(static_cast<size_t>(source.max_draft_rows)) {
  WeightReader& reader = source.reader;
  const int64_t hidden = config_.hidden, series = shape_.Series();
  const std::string own = module + "compressor.", indexer = module + "indexer.", keys = indexer + "compressor.";
  const auto part = [&](const std::string& name, int64_t channels) {
    return StackedWeight{.module = name, .out = series * channels, .whole = true};
  };
  std::vector<StackedWeight> inputs = {part(own + "wkv", shape_.entry_dim), part(own + "wgate", shape_.entry_dim)};
  entry_bias_ = ReadElements(source, own + "ape", std::array{int64_t{shape_.row_tokens}, series * shape_.entry_dim});
  entry_norm_ = reader.Vector(own + "norm.weight", shape_.entry_dim);
  if (shape_.key_dim != 0) {
    inputs.push_back(part(keys + "wkv", shape_.key_dim));
    inputs.push_back(part(keys + "wgate", shape_.key_dim));
    key_bias_ = ReadElements(source, keys + "ape", std::array{int64_t{shape_.row_tokens}, series * shape_.key_dim});
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
  const int64_t entries = rows;  // of row_tokens 1; sequences may have one each
  inputs_ = scratch.Take(rows * shape_.InputWidth());
  entries_ = scratch.Take(entries * shape_.entry_dim);
  keys_ = scratch.Take(entries * shape_.key_dim);
  queries_ = shape_.key_dim == 0 ? nullptr : scratch.Take(rows * config_.indexer.heads * shape_.key_dim);
  weights_ = scratch.Take(rows * config_.indexer.heads);
  first_entry_ = reinterpret_cast<int64_t*>(scratch.Take(rows * kFloatsOfInteger));
  entry_positions_ = reinterpret_cast<int64_t*>(scratch.Take(entries * kFloatsOfInteger));
}

// Numbers the entries of the step, and returns how many there are.
int64_t Compressor::CountEntries(const AttentionStep& step, const cache::StateStep& states) noexcept {
  int64_t count = 0;
  for (size_t sequence = 0; sequence < states.first_segments.size(); ++sequence) {
    const auto segments = states.OfSequence(sequence);
    const int64_t first = segments.front().first_row, end = segments.back().first_row + segments.back().tokens;
    first_entry_[sequence] = count;
    const int64_t last = (step.positions[end - 1] + 1) / shape_.row_tokens;
    for (int64_t entry = step.positions[first] / shape_.row_tokens; entry < last; ++entry) {
      entry_positions_[count++] = entry * shape_.row_tokens;
    }
  }
  return count;
}

void Compressor::Forward(const AttentionStep& step, const float* x, const float* low) noexcept {
  const cache::StateStep states = step.backend->States(*step.plan, step.inputs_layer);
  const int64_t entries = CountEntries(step, states);
  to_inputs_->Forward(x, step.rows, inputs_, shape_.InputWidth());
  kernels::Compress({.shape = shape_,
                     .inputs = inputs_,
                     .positions = step.positions,
                     .first_entry = first_entry_,
                     .entry_bias = entry_bias_.data(),
                     .key_bias = key_bias_.data(),
                     .states = states,
                     .entries = entries_,
                     .keys = keys_},
                    ops_.threads());
  inputs_layer_ = step.inputs_layer;
  drafts_.Keep(ops_, states, inputs_, shape_.InputWidth(), shape_.InputWidth(), 0);
  size_t draft = 0;
  for (const cache::StateSegment& segment : states.segments) {
    for (int64_t row = 0; row < segment.tokens && segment.to == cache::kNoPage; ++row) {
      draft_positions_[draft++] = step.positions[segment.first_row + row];
    }
  }
  if (entries != 0) {
    Finish(step, entry_norm_, entries, shape_.entry_dim, entries_);
    step.backend->Append(*step.plan, step.entries_layer, entries_, nullptr, shape_.entry_dim);
  }
  if (!to_queries_) return;
  if (entries != 0) {
    Finish(step, key_norm_, entries, shape_.key_dim, keys_);
    step.backend->Append(*step.plan, step.index_layer, keys_, nullptr, shape_.key_dim);
  }
  Select(step, x, low);
}

void Compressor::AdvanceStates(const AttentionStep& step) noexcept {
  const cache::StateStep states = step.backend->States(*step.plan, inputs_layer_);
  kernels::Compress({.shape = shape_, .inputs = drafts_.Rows(), .positions = draft_positions_.data(), .states = states},
                    ops_.threads());
}

// Norm and rope of the entries, or of their keys.
void Compressor::Finish(const AttentionStep& step, const Buffer& norm, int64_t entries, int width,
                        float* rows) noexcept {
  const int rotary_dim = config_.compression.rotary_dim;
  ops_.RmsNorm(rows, width, norm.as<float>(), static_cast<float>(config_.rms_eps), entries, width, rows, width);
  ops_.Rope(rows + width - rotary_dim, width, entries, 1, width, rotary_dim, true, step.rope_table, entry_positions_);
}

void Compressor::Select(const AttentionStep& step, const float* x, const float* low) noexcept {
  const int64_t rows = step.rows, heads = config_.indexer.heads, width = heads * shape_.key_dim;
  const int rotary_dim = config_.compression.rotary_dim;
  to_queries_->Forward(low, rows, queries_, width);
  ops_.Rope(queries_ + shape_.key_dim - rotary_dim, width, rows, static_cast<int>(heads), shape_.key_dim, rotary_dim,
            true, step.rope_table, step.positions);
  to_weights_->Forward(x, rows, weights_, heads);
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(width)));
  ops_.Scale(weights_, factor, rows * heads);
  step.backend->Select(*step.plan, step.index_layer, queries_, width, weights_);
}

}  // namespace kvanta::models
