// Attention on dense arrays, for tests and research: writes keys and values into a private KV cache of a given scheme,
// page by page as the engine does, and runs any backend on it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/scheme.h"

namespace kvanta::attention {

struct ArrayAttention {
  std::string scheme = "bf16";   // KvScheme::Parse
  std::string backend = "auto";  // BackendNames()
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 64;
  int page_size = 64;
  int threads = 1;
  float softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  float softcap = 0;        // 0: none
  int sliding_window = 0;   // 0: none
  // Empty: 1.0; only of formats with static scales. Means, matrices and outlier channels: of K, and only where the
  // scheme says so.
  formats::LayerScales scales = {};
};

struct ArrayAttentionResult {
  std::vector<float> out;   // [query_tokens][heads][head_dim]
  int64_t cache_bytes = 0;  // all pages written, including exact records
  int64_t saturated = 0;    // values outside the format's range
};

// q: f32 [query_tokens][heads][head_dim]; k, v: f32 [tokens][kv_heads][head_dim], dense. Queries have the
// positions [query_start, query_start + query_tokens), whose end must equal `tokens`. Attention is causal. Throws
// InputError for mismatched shapes, unknown names and invalid scales.
ArrayAttentionResult RunArrayAttention(const ArrayAttention& options, std::span<const float> q,
                                       std::span<const float> k, std::span<const float> v, int64_t query_start);

}  // namespace kvanta::attention
