// Weights that recurrent blocks have in common.
#pragma once

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

// A tensor of `shape` as f32, in the file's order.
inline std::vector<float> ReadElements(const BlockSource& source, const std::string& name,
                                       std::span<const int64_t> shape) {
  const weights::WeightView view = source.reader.Elements(name, shape, kernels::WeightType::kF32);
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  source.reader.AddBytes(count * static_cast<int64_t>(sizeof(float)));
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(ElementValue(view, i));
  return values;
}

// Values in the device's memory.
template <class T>
Buffer Upload(const BlockSource& source, const std::vector<T>& values) {
  Device& device = source.ops.device();
  Buffer buffer = device.Allocate(values.size() * sizeof(T));
  device.CopyIn(buffer.data(), values.data(), buffer.bytes());
  return buffer;
}

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

// Decays of the heads, -exp(A_log), which GGUF files have as A. f32 [heads]; Kimi Linear's A_log is [1][1][heads][1].
inline std::vector<float> ReadDecay(const BlockSource& source, const std::string& module, int64_t heads) {
  const bool is_log = !source.reader.Has(module + "A");
  const std::string name = module + (is_log ? "A_log" : "A");
  const int64_t kimi[] = {1, 1, heads, 1};
  std::vector<float> values =
      source.reader.HasShape(name, kimi) ? ReadElements(source, name, kimi) : source.reader.KeptValues(name, heads);
  for (float& value : values) value = is_log ? -std::exp(value) : value;
  return values;
}

}  // namespace kvanta::models
