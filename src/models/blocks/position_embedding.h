// Learned embeddings of positions, which are added to those of the tokens (GPT-2, OPT).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernels/ops.h"
#include "models/config/config.h"
#include "models/weights.h"

namespace kvanta::models {

class PositionEmbedding {
 public:
  PositionEmbedding() = default;  // none
  // The table config.names.positions of the decoder `prefix`, of config.max_position positions.
  PositionEmbedding(WeightReader& reader, kernels::Ops& ops, const ModelConfig& config, const std::string& prefix);

  explicit operator bool() const noexcept { return static_cast<bool>(table_); }
  // hidden[r] += the embedding of positions[r]; scratch, hidden: f32 [rows][hidden size].
  void Add(kernels::Ops& ops, std::span<const int64_t> positions, float* scratch, float* hidden) const noexcept;

 private:
  int64_t width_ = 0, offset_ = 0;  // the row of position 0
  Buffer table_;                    // f32 [offset + max_position][width]
};

}  // namespace kvanta::models
