#include "models/blocks/hyper_connections.h"

#include <array>

#include "models/blocks/norm.h"

namespace kvanta::models {

HyperConnection::HyperConnection(const BlockSource& source, const std::string& name, bool head)
    : ops_(source.ops),
      shape_{.streams = source.config.hyper_connections.streams,
             .hidden = source.config.hidden,
             .sinkhorn_iterations = source.config.hyper_connections.sinkhorn_iterations,
             .eps = source.config.hyper_connections.eps,
             .head = head},
      norm_eps_(static_cast<float>(source.config.rms_eps)),
      norm_(Filled(source.reader.device(), shape_.Width(), 1)) {
  weights::WeightView rows =
      source.reader.Elements(name + "_fn", std::array{shape_.Weights(), shape_.Width()}, kernels::WeightType::kF32);
  rows.module = name;
  to_weights_ = source.reader.Pack(std::span(&rows, 1), {}, kernels::WeightType::kF32);
  base_ = source.reader.Vector(name + "_base", shape_.Weights());
  scale_ = source.reader.Vector(name + "_scale", head ? 1 : 3);
}

void HyperConnection::Collapse(const float* streams, int64_t rows, float* out) noexcept {
  const int64_t width = shape_.Width();
  ops_.RmsNorm(streams, width, norm_.as<float>(), norm_eps_, rows, width, scratch_.normed, width);
  to_weights_->Forward(scratch_.normed, rows, scratch_.weights, shape_.Weights());
  ops_.MakeStreamWeights(shape_, {.scale = scale_.as<float>(), .base = base_.as<float>()}, rows, scratch_.weights);
  ops_.CollapseStreams(shape_, streams, scratch_.weights, rows, out);
}

void HyperConnection::Expand(const float* x, int64_t rows, float* streams) noexcept {
  ops_.ExpandStreams(shape_, scratch_.weights, x, rows, streams);
}

HyperStreams::HyperStreams(const BlockSource& source, const std::string& prefix)
    : ops_(source.ops),
      config_(source.config),
      cache_layers_(source.config.CacheLayersOf()),
      // transformers saves another name than the published one.
      head_(source, prefix + (source.reader.HasPrefix(prefix + "hc_head.") ? "hc_head.hc" : "hc_head"), true) {}

void HyperStreams::ReadLayer(const BlockSource& source, const std::string& prefix) {
  attention_.emplace_back(source, prefix + "hc_attn");
  mlp_.emplace_back(source, prefix + "hc_ffn");
}

void HyperStreams::Place(Scratch& scratch, int64_t rows) noexcept {
  const int64_t streams = config_.hyper_connections.streams;
  streams_ = scratch.Take(rows * streams * config_.hidden);
  const HyperConnection::Rows shared{.normed = scratch.Take(rows * streams * config_.hidden),
                                     .weights = scratch.Take(rows * (2 + streams) * streams)};
  for (HyperConnection& connection : attention_) connection.SetScratch(shared);
  for (HyperConnection& connection : mlp_) connection.SetScratch(shared);
  head_.SetScratch(shared);
}

void HyperStreams::Forward(std::span<DecoderLayer> layers, const RopeTables& ropes, AttentionStep step,
                           const int32_t* tokens, const Rows& scratch, float* hidden) noexcept {
  const int64_t rows = step.rows, width = config_.hidden, streams = config_.hyper_connections.streams;
  for (int64_t stream = 0; stream < streams; ++stream) {
    ops_.Copy(hidden, width, rows, width, streams_ + stream * width, streams * width);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    DecoderLayer& layer = layers[i];
    step.layer = static_cast<int>(i);
    step.index_layer = cache_layers_[i].keys;
    step.entries_layer = cache_layers_[i].entries;
    step.inputs_layer = cache_layers_[i].inputs;
    ropes.Set(config_, step);
    attention_[i].Collapse(streams_, rows, scratch.normed);
    layer.pre_attention_norm.Forward(ops_, scratch.normed, width, rows, scratch.normed, width);
    layer.attention->Forward(step, scratch.normed, scratch.block_out);
    attention_[i].Expand(scratch.block_out, rows, streams_);
    mlp_[i].Collapse(streams_, rows, scratch.normed);
    layer.pre_mlp_norm.Forward(ops_, scratch.normed, width, rows, scratch.normed, width);
    layer.mlp->SetTokens(tokens);
    layer.mlp->Forward(scratch.normed, rows, scratch.block_out);
    mlp_[i].Expand(scratch.block_out, rows, streams_);
  }
  head_.Collapse(streams_, rows, hidden);
}

}  // namespace kvanta::models
