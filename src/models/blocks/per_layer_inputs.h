// Per-layer embeddings (Gemma 3n and 4): each layer has an input of its own per token, made of a second embedding table
// and a projection of the first, and adds a function of it to the hidden states. transformers:
// models/gemma4/modeling_gemma4.py.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/blocks/layer_blocks.h"
#include "models/blocks/norm.h"

namespace kvanta::models {

class PerLayerInputs {
 public:
  // `prefix`: of the decoder's tensors, "model.". Layers read theirs by ReadLayer(), in ascending order.
  PerLayerInputs(const BlockSource& source, const std::string& prefix, const kernels::LinearKind& embedding_kind,
                 float embedding_scale);

  // `prefix`: of the layer's tensors, "model.layers.0.".
  void ReadLayer(const BlockSource& source, const std::string& prefix);

  // Inputs and scratch memory of up to `rows` rows; the inputs are kept over all layers of a step.
  void PlaceInputs(Scratch& scratch, int64_t rows) noexcept;
  void Place(Scratch& scratch, int64_t rows) noexcept;

  // Inputs of all layers, from the tokens and their (scaled) embeddings, f32 [rows][hidden].
  void Prepare(std::span<const int32_t> tokens, const float* embeddings) noexcept;
  // Keeps the inputs of some rows alone.
  void SelectOutputRows(std::span<const int64_t> rows) noexcept;
  // A layer's change of the hidden states before its norm, f32 [rows][hidden].
  void Forward(int layer, const float* hidden, int64_t rows, float* out) noexcept;

 private:
  struct Layer {
    std::unique_ptr<kernels::Linear> gate, projection;
  };

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const int64_t width_;                         // channels of a layer
  std::unique_ptr<kernels::Linear> embedding_;  // [vocab][layers * width]
  float embedding_scale_;
  std::unique_ptr<kernels::Linear> projection_;  // hidden -> layers * width
  Norm norm_;                                    // norm of each layer's channels
  std::vector<Layer> layers_;
  float* inputs_ = nullptr;    // [rows][layers * width]
  float* embedded_ = nullptr;  // the same
  float* both_ = nullptr;      // [rows][2 width]: gate | input
  float* gated_ = nullptr;     // [rows][width]
};

}  // namespace kvanta::models
