// A forward pass whose keys and values are observed, to measure scales and statistics on what the model computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "attention/backend.h"
#include "models/model.h"

namespace kvanta::observe {

using BackendFactory =
    std::function<std::unique_ptr<attention::Backend>(cache::PagePool& store, attention::BackendConfig config)>;

class KvObserver {
 public:
  virtual ~KvObserver() = default;
  // K and V of `rows` new tokens of one layer, after RoPE: f32 [rows][kv_heads * head_dim], row stride `stride` floats.
  virtual void OnAppend(int layer, const float* k, const float* v, int64_t stride, int64_t rows) noexcept = 0;
  // True to be called with queries as well.
  virtual bool ObservesQueries() const noexcept { return false; }
  // Queries of `rows` new tokens of one layer, after RoPE: f32 [rows][heads * head_dim], row stride `stride` floats.
  virtual void OnRun(int /*layer*/, const float* /*q*/, int64_t /*stride*/, int64_t /*rows*/) noexcept {}
};

// Forwards `tokens` as one sequence, at most max_rows at a time, through an unquantized cache of its own of `layout`'s
// shapes, and calls the observer with every layer's K and V, in the order of chunks, then layers.
void ForwardObserved(models::Model& model, const BackendFactory& make_backend, const formats::CacheLayout& layout,
                     std::span<const int32_t> tokens, int64_t max_rows, KvObserver& observer);

// The moments of +query have one shape for all layers. Throws InputError where the layers' KV heads differ.
void CheckEqualHeads(const models::ModelConfig& config);

}  // namespace kvanta::observe
