// Weights that recurrent blocks have in common.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

// Conv1d's [channels][1][taps] as f32 [taps][channels].
inline std::vector<float> ReadConvolution(const BlockSource& source, const std::string& name, int64_t channels,
                                          int64_t taps) {
  const int64_t shape[] = {channels, 1, taps};
  const weights::WeightView weights = source.reader.Elements(name, shape, source.store);
  std::vector<float> values(static_cast<size_t>(channels * taps));
  source.reader.AddBytes(channels * taps * static_cast<int64_t>(sizeof(float)));
  for (int64_t i = 0; i < channels * taps; ++i) {
    values[static_cast<size_t>(i % taps * channels + i / taps)] = ElementValue(weights, i);
  }
  return values;
}

// Decays of the heads, -exp(A_log), which GGUF files have as A. f32 [heads].
inline std::vector<float> ReadDecay(const BlockSource& source, const std::string& module, int64_t heads) {
  const bool is_log = !source.reader.Has(module + "A");
  std::vector<float> values = source.reader.KeptValues(module + (is_log ? "A_log" : "A"), heads);
  for (float& value : values) value = is_log ? -std::exp(value) : value;
  return values;
}

}  // namespace kvanta::models
