#include "models/blocks/per_layer_inputs.h"

#include <cmath>
#include <numbers>
#include <utility>

namespace kvanta::models {

PerLayerInputs::PerLayerInputs(const BlockSource& source, const std::string& prefix,
                               const kernels::LinearKind& embedding_kind, float embedding_scale)
    : ops_(source.ops),
      config_(source.config),
      width_(source.config.hidden_size_per_layer_input),
      embedding_scale_(embedding_scale) {
  WeightReader& reader = source.reader;
  const int64_t all = config_.layers * width_;
  embedding_ = reader.Linear({{prefix + "embed_tokens_per_layer", config_.vocab_size_per_layer_input}}, all, false,
                             embedding_kind);
  projection_ = reader.Linear({{prefix + "per_layer_model_projection", all}}, config_.hidden, false, {source.store});
  norm_ = Norm(reader, config_, prefix + "per_layer_projection_norm", width_);
}

void PerLayerInputs::ReadLayer(const BlockSource& source, const std::string& prefix) {
  layers_.push_back(
      {.gate = source.reader.Linear({{prefix + "per_layer_input_gate", width_}}, config_.hidden, false, {source.store}),
       .projection =
           source.reader.Linear({{prefix + "per_layer_projection", config_.hidden}}, width_, false, {source.store})});
}

void PerLayerInputs::PlaceInputs(Scratch& scratch, int64_t rows) noexcept {
  inputs_ = scratch.Take(rows * config_.layers * width_);
  embedded_ = scratch.Take(rows * config_.layers * width_);
}

void PerLayerInputs::Place(Scratch& scratch, int64_t rows) noexcept {
  both_ = scratch.Take(rows * 2 * width_);
  gated_ = scratch.Take(rows * width_);
}

void PerLayerInputs::Prepare(std::span<const int32_t> tokens, const float* embeddings) noexcept {
  const auto rows = static_cast<int64_t>(tokens.size());
  const int64_t all = config_.layers * width_;
  projection_->Forward(embeddings, rows, inputs_, all);
  ops_.Scale(inputs_, static_cast<float>(1 / std::sqrt(static_cast<double>(config_.hidden))), rows * all);
  norm_.Forward(ops_, inputs_, width_, rows * config_.layers, inputs_, width_);
  ops_.Embed(*embedding_, 0, tokens.data(), rows, embedded_);
  if (embedding_scale_ != 1) ops_.Scale(embedded_, embedding_scale_, rows * all);
  ops_.Add(inputs_, embedded_, rows * all);
  ops_.Scale(inputs_, static_cast<float>(1 / std::numbers::sqrt2), rows * all);
}

void PerLayerInputs::SelectOutputRows(std::span<const int64_t> rows) noexcept {
  ops_.Gather(inputs_, config_.layers * width_, rows.data(), static_cast<int64_t>(rows.size()), embedded_);
  std::swap(inputs_, embedded_);
}

void PerLayerInputs::Forward(int layer, const float* hidden, int64_t rows, float* out) noexcept {
  const Layer& own = layers_[static_cast<size_t>(layer)];
  own.gate->Forward(hidden, rows, both_, 2 * width_);
  ops_.Copy(inputs_ + layer * width_, config_.layers * width_, rows, width_, both_ + width_, 2 * width_);
  ops_.ActivateMul(config_.mlp.activation, 0, both_, rows, width_, gated_, nullptr);
  own.projection->Forward(gated_, rows, out, config_.hidden);
}

}  // namespace kvanta::models
