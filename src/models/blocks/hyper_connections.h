// Hyper-connections of a decoder (ModelConfig::hyper_connections): weights that the streams of hidden states give for a
// block's input and output (kernels/hyper_connections/hyper_connections.h).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/blocks/decoder_layer.h"
#include "models/blocks/layer_blocks.h"
#include "models/rope_tables.h"

namespace kvanta::models {

class HyperConnection {
 public:
  // Names of its tensors: NAME_fn, NAME_base, NAME_scale. `head`: of a model's last hidden states, which have an input
  // alone.
  HyperConnection(const BlockSource& source, const std::string& name, bool head = false);

  // Scratch: f32 [rows][streams * hidden], of Collapse; and [rows][kernels::HyperConnectionShape::Weights()], which
  // Expand reads. Connections share it.
  struct Rows {
    float* normed = nullptr;
    float* weights = nullptr;
  };
  void SetScratch(const Rows& scratch) noexcept { scratch_ = scratch; }
  // The block's input: streams f32 [rows][streams][hidden] -> out f32 [rows][hidden].
  void Collapse(const float* streams, int64_t rows, float* out) noexcept;
  // Adds the block's output to the streams. After Collapse.
  void Expand(const float* x, int64_t rows, float* streams) noexcept;

 private:
  kernels::Ops& ops_;
  const kernels::HyperConnectionShape shape_;
  const float norm_eps_;
  std::unique_ptr<kernels::Linear> to_weights_;  // streams * hidden -> weights
  Buffer norm_;                                  // f32 [streams * hidden], all 1
  Buffer base_, scale_;                          // f32, of kernels::StreamParameters
  Rows scratch_;
};

// The streams of a decoder's hidden states, and the connections of its layers' blocks.
class HyperStreams {
 public:
  // `prefix`: of the decoder's tensors.
  HyperStreams(const BlockSource& source, const std::string& prefix);
  // Reads the connections of the next layer. `prefix`: of its tensors.
  void ReadLayer(const BlockSource& source, const std::string& prefix);

  void Place(Scratch& scratch, int64_t rows) noexcept;
  // Scratch of Forward, f32 [rows][hidden].
  struct Rows {
    float* normed = nullptr;
    float* block_out = nullptr;
  };
  // Forward of all layers: hidden, f32 [rows][hidden], embeddings that become the last hidden states, before the norm.
  // step: without what is a layer's own.
  void Forward(std::span<DecoderLayer> layers, const RopeTables& ropes, AttentionStep step, const int32_t* tokens,
               const Rows& scratch, float* hidden) noexcept;

 private:
  kernels::Ops& ops_;
  const ModelConfig& config_;
  const std::vector<ModelConfig::OwnCacheLayers> cache_layers_;
  std::vector<HyperConnection> attention_, mlp_;  // of each layer
  HyperConnection head_;
  float* streams_ = nullptr;  // f32 [rows][streams][hidden]
};

}  // namespace kvanta::models
