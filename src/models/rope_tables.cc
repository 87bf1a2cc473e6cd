#include "models/rope_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kvanta/error.h"
#include "models/blocks/rope.h"

namespace kvanta::models {
namespace {

Buffer CopyIn(Device& device, const std::vector<float>& values) {
  Buffer buffer = device.Allocate(values.size() * sizeof(float));
  device.CopyIn(buffer.data(), values.data(), buffer.bytes());
  return buffer;
}

}  // namespace

RopeTables::RopeTables(kernels::Ops& ops, const ModelConfig& config, int64_t positions,
                       std::span<const float> exponents) {
  if (positions < 1 || positions > config.max_position) {
    throw InputError(fmt::format("{} positions; this model takes 1 to {}", positions, config.max_position));
  }
  std::vector<RopeSpec> specs;
  for (const LayerSpec& layer : config.layer_specs) {
    const auto found = std::ranges::find(specs, layer.rope);
    of_layer_.push_back(static_cast<int>(found - specs.begin()));
    if (found == specs.end()) specs.push_back(layer.rope);
  }
  Device& device = ops.device();
  for (const RopeSpec& spec : specs) {
    Tables& tables = tables_.emplace_back();
    if (spec.rotary_dim == 0) continue;
    // The device's memory first: its allocation is checked against what the machine has.
    const bool scales_queries = spec.llama_4_scaling_beta != 0 && !config.UsesMla();
    const size_t bytes = static_cast<size_t>(positions) * spec.rotary_dim * sizeof(float);
    tables.keys = device.Allocate(bytes);
    tables.queries = scales_queries ? device.Allocate(bytes) : tables.keys;
    std::vector<float> table(static_cast<size_t>(positions) * spec.rotary_dim);
    RopeFrequencies frequencies = MakeRopeFrequencies(spec, positions);
    for (size_t i = 0; i < exponents.size(); ++i) frequencies.inverse[i] *= std::exp(exponents[i]);
    FillRopeTable(frequencies, table);
    device.CopyIn(tables.keys.data(), table.data(), bytes);
    if (scales_queries) {
      ScaleQueryTable(spec, table);
      device.CopyIn(tables.queries.data(), table.data(), bytes);
    }
  }
  if (const std::vector<float> scales = QueryScales(config, positions); !scales.empty()) {
    query_scales_ = CopyIn(device, scales);
  }
}

void RopeTables::Set(const ModelConfig& config, AttentionStep& step) const noexcept {
  const auto layer = static_cast<size_t>(step.layer);
  const Tables& tables = tables_[static_cast<size_t>(of_layer_[layer])];
  step.rope = &config.layer_specs[layer].rope;
  step.rope_table = tables.keys.as<float>();
  step.query_rope_table = tables.queries.as<float>();
  step.query_scales = step.rope->rotary_dim == 0 || config.UsesMla() ? query_scales_.as<float>() : nullptr;
}

}  // namespace kvanta::models
