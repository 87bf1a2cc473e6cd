#include "models/blocks/position_embedding.h"

#include <fmt/format.h>

#include <array>
#include <vector>

namespace kvanta::models {

PositionEmbedding::PositionEmbedding(WeightReader& reader, kernels::Ops& ops, const ModelConfig& config,
                                     const std::string& prefix)
    : width_(config.hidden), offset_(config.position_offset) {
  const int64_t rows = offset_ + config.max_position;
  const std::string name = fmt::format("{}{}.weight", prefix, config.names.positions);
  const weights::WeightView view = reader.Elements(name, std::array{rows, width_}, kernels::WeightType::kF32);
  std::vector<float> values(static_cast<size_t>(rows * width_));
  for (int64_t row = 0; row < rows; ++row) weights::ReadWeightRow(view, row, values.data() + row * width_);
  table_ = ops.device().Allocate(values.size() * sizeof(float));
  ops.device().CopyIn(table_.data(), values.data(), table_.bytes());
  reader.AddBytes(static_cast<int64_t>(table_.bytes()));
}

void PositionEmbedding::Add(kernels::Ops& ops, std::span<const int64_t> positions, float* scratch,
                            float* hidden) const noexcept {
  const auto rows = static_cast<int64_t>(positions.size());
  ops.Gather(table_.as<float>() + offset_ * width_, width_, positions.data(), rows, scratch);
  ops.Add(hidden, scratch, rows * width_);
}

}  // namespace kvanta::models
