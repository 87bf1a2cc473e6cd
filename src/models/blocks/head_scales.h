// Factors of queries that grow with the logarithm of the position, of each head (MlaConfig::log_query_scales).
#pragma once

#include <string>

#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

class HeadScales {
 public:
  HeadScales() = default;  // none
  // `module`: before TensorNames::query_scale and query_bias, [heads]. heads: those of `all` that are multiplied here.
  HeadScales(const BlockSource& source, const std::string& module, int all, int first, int heads) : heads_(heads) {
    const auto read = [&](std::string_view name) {
      const std::vector<float> values = source.reader.KeptValues(module + std::string(name), all);
      Buffer buffer = source.ops.device().Allocate(static_cast<size_t>(heads) * sizeof(float));
      source.ops.device().CopyIn(buffer.data(), values.data() + first, buffer.bytes());
      return buffer;
    };
    scale_ = read(source.config.names.query_scale);
    bias_ = read(source.config.names.query_bias);
  }

  explicit operator bool() const noexcept { return heads_ != 0; }
  void Place(Scratch& scratch, int64_t rows) noexcept {
    factors_ = scratch.Take(rows * heads_);
    biases_ = scratch.Take(rows * heads_);
  }
  // x: f32 [rows][heads * channels], dense. step.query_scales: log(1 + position).
  void Multiply(kernels::Ops& ops, const AttentionStep& step, float* x, int64_t channels) const noexcept {
    const int64_t rows = step.rows, width = heads_ * channels;
    ops.Copy(scale_.as<float>(), 0, rows, heads_, factors_, heads_);
    ops.Copy(bias_.as<float>(), 0, rows, heads_, biases_, heads_);
    ops.ScaleRows(factors_, heads_, rows, heads_, step.query_scales, step.positions);
    ops.Add(factors_, biases_, rows * heads_);
    ops.MulGate(kernels::GateFunction::kIdentity, x, width, factors_, heads_, rows, width, channels);
  }

 private:
  int64_t heads_ = 0;
  Buffer scale_, bias_;       // f32 [heads]
  float* factors_ = nullptr;  // f32 [rows][heads], scratch
  float* biases_ = nullptr;   // the same
};

}  // namespace kvanta::models
