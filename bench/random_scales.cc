#include "bench/random_scales.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "bench/random_values.h"
#include "formats/bit_allocation.h"
#include "formats/query_transform.h"

namespace kvanta {
namespace {

// I - 2 u u^T / |u|^2 with a random u, for each head: [heads][n][n].
std::vector<float> Reflections(int heads, int n, uint32_t seed) {
  const std::vector<float> directions = NormalValues(int64_t{heads} * n, seed);
  std::vector<float> matrices;
  for (int head = 0; head < heads; ++head) {
    const float* u = directions.data() + int64_t{head} * n;
    float norm = 0;
    for (int i = 0; i < n; ++i) norm += u[i] * u[i];
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) matrices.push_back((i == j ? 1.0F : 0.0F) - 2 * u[i] * u[j] / norm);
    }
  }
  return matrices;
}

// Deviations that fall by half over every quarter of the channels, as those of a trained model do about.
std::vector<float> FallingDeviations(int heads, int n) {
  std::vector<float> deviations;
  for (int i = 0; i < heads * n; ++i) {
    deviations.push_back(std::exp2(-4.0F * static_cast<float>(i % n) / static_cast<float>(n)));
  }
  return deviations;
}

}  // namespace

formats::LayerScales RandomScales(const formats::LayerScheme& layer, uint32_t seed) {
  formats::LayerScales scales;
  const int heads = layer.kv_heads, n = layer.shape.head_dim;
  if (layer.k.mean) {
    scales.k.mean = NormalValues(int64_t{heads} * n, seed, 0.1F);
    for (float& mean : scales.k.mean) mean = std::clamp(mean, -0.25F, 0.25F);
  }
  if (layer.k.query) {
    std::vector<float> matrices = Reflections(heads, n, seed + 1);
    if (formats::IsAllocated(layer.k.format->code)) {
      scales.k.query =
          formats::MakeKltTransform({.matrices = std::move(matrices), .deviations = FallingDeviations(heads, n)}, heads,
                                    n, layer.k.format->code_bits, layer.k.format->scaling.channel_bits);
    } else {
      scales.k.query = std::make_shared<formats::QueryTransform>(std::move(matrices), heads, n);
    }
  }
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i < layer.k.outliers; ++i) scales.k.outliers.push_back(i);
  }
  return scales;
}

}  // namespace kvanta
