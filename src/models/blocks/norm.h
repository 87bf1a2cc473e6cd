// RMSNorm or LayerNorm of a model (ModelConfig), with its weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/head_transform.h"
#include "kernels/ops.h"
#include "models/config/config.h"
#include "models/weights.h"

namespace kvanta::models {

// f32 [size] of one value.
inline Buffer Filled(Device& device, int64_t size, float value) {
  const std::vector<float> values(static_cast<size_t>(size), value);
  Buffer buffer = device.Allocate(values.size() * sizeof(float));
  device.CopyIn(buffer.data(), values.data(), buffer.bytes());
  return buffer;
}

class Norm {
 public:
  Norm() = default;  // none
  // `module` with weights [width], which are 1 without config.norm_weights, or [heads][width] if heads != 0. Weights
  // and biases are multiplied by `scale`.
  Norm(WeightReader& reader, const ModelConfig& config, const std::string& module, int64_t width, int heads = 0,
       double scale = 1)
      : layer_norm_(config.norm != NormKind::kRms),
        eps_(static_cast<float>(config.rms_eps)),
        width_(width),
        heads_(heads),
        weight_(config.norm_weights ? reader.Vector(module + ".weight", width, config.norm_weight_offset, scale, heads)
                                    : Filled(reader.device(), width, static_cast<float>(scale))) {
    if (config.norm == NormKind::kLayerWithBias) bias_ = reader.Vector(module + ".bias", width, 0, scale);
  }

  explicit operator bool() const noexcept { return static_cast<bool>(weight_); }
  bool HasWeightsByHead() const noexcept { return heads_ != 0; }

  // Sets the norm of heads as a part of another operation. False if none has this one.
  bool SetTransform(kernels::HeadTransform& heads) const noexcept {
    if (layer_norm_) return false;
    heads.norm_weight = weight_.as<float>();
    heads.norm_stride = HasWeightsByHead() ? static_cast<int32_t>(width_) : 0;
    heads.norm_eps = eps_;
    return true;
  }

  // x += y unless null, then out = norm of x; dense rows. reader: as of Ops::AddRmsNorm().
  void AddAndForward(kernels::Ops& ops, float* x, const float* y, int64_t rows, float* out,
                     const kernels::Linear* reader) const noexcept {
    if (!layer_norm_) return ops.AddRmsNorm(x, y, weight_.as<float>(), eps_, rows, width_, out, reader);
    if (y != nullptr) ops.Add(x, y, rows * width_);
    Forward(ops, x, width_, rows, out, width_);
  }

  // x, out: f32 [rows][width], row strides in floats; may alias. `head`: of weights by head.
  void Forward(kernels::Ops& ops, const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride,
               int64_t head = 0) const noexcept {
    const float* weight = weight_.as<float>() + (HasWeightsByHead() ? head * width_ : 0);
    if (layer_norm_) {
      ops.LayerNorm(x, x_stride, weight, bias_ ? bias_.as<float>() : nullptr, eps_, rows, width_, out, out_stride);
    } else {
      ops.RmsNorm(x, x_stride, weight, eps_, rows, width_, out, out_stride);
    }
  }

 private:
  bool layer_norm_ = false;
  float eps_ = 0;
  int64_t width_ = 0;
  int heads_ = 0;
  Buffer weight_, bias_;  // f32 [width], weights maybe [heads][width]; empty: none
};

}  // namespace kvanta::models
