// Input of a layer that predicts further tokens: a projection of a token's embedding and of the hidden state before it,
// each of them normed. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2.2.
#pragma once

#include <memory>
#include <string>

#include "models/blocks/layer_blocks.h"
#include "models/blocks/norm.h"

namespace kvanta::models {

class PredictorInput {
 public:
  // `module`: of its tensors, "mtp.".
  PredictorInput(const BlockSource& source, const std::string& module)
      : ops_(source.ops),
        width_(source.config.hidden),
        embedding_norm_(Read(source, module, source.config.names.predictor.embedding_norm)),
        hidden_norm_(Read(source, module, source.config.names.predictor.hidden_norm)),
        projection_(source.reader.Linear({{module + std::string(source.config.names.predictor.projection), width_}},
                                         2 * width_, false, source.store)) {}

  void Place(Scratch& scratch, int64_t rows) noexcept { pairs_ = scratch.Take(rows * 2 * width_); }
  // embedded, hidden: f32 [rows][width]; `hidden` becomes the layer's input.
  void Forward(const float* embedded, int64_t rows, float* hidden) noexcept {
    embedding_norm_.Forward(ops_, embedded, width_, rows, pairs_, 2 * width_);
    hidden_norm_.Forward(ops_, hidden, width_, rows, pairs_ + width_, 2 * width_);
    projection_->Forward(pairs_, rows, hidden, width_);
  }

 private:
  static Norm Read(const BlockSource& source, const std::string& module, std::string_view name) {
    return {source.reader, source.config, module + std::string(name), source.config.hidden};
  }

  kernels::Ops& ops_;
  int64_t width_;
  Norm embedding_norm_, hidden_norm_;
  std::unique_ptr<kernels::Linear> projection_;
  float* pairs_ = nullptr;  // scratch, f32 [rows][2 width]
};

}  // namespace kvanta::models
