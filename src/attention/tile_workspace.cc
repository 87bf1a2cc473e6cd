// Memory of TileAttention.
#include <algorithm>

#include "attention/kernels_of_format.h"
#include "attention/tile_attention.h"
#include "base/math.h"

namespace kvanta::attention {
namespace {

using kernels::AttentionKernels;
using kernels::kMaxPageTokens;
using kernels::kPassRows;

int64_t Align(int64_t bytes) {
  return RoundUp(bytes, kWorkspaceAlignment);
}

}  // namespace

bool Attends(const AttentionKernels& kernels, const formats::LayerScheme& layer) noexcept {
  const auto attends = [&](const formats::Format& keys, const formats::Format& values) {
    if (keys.scaling.block != formats::ScaleType::kNone && !kernels::HasBlockScales(keys.code)) return false;
    return KeyKernelOf(kernels, keys.code, keys.scaling).score != nullptr &&
           kernels.values[Index(values.code)].accumulate != nullptr;
  };
  return attends(*layer.k.format, *layer.v.format) &&
         std::ranges::all_of(layer.ages, [&](const auto& age) { return attends(*age.k.format, *age.v.format); });
}

void TileWorkspace::Reserve(Device& device, int rows, const std::vector<LayerView>& layers,
                            const AttentionKernels& kernels) {
  int64_t query_bytes = 0, latent_bytes = 0;
  int head_dim = 0;
  size_t ages = 0;
  for (const LayerView& layer : layers) {
    head_dim = std::max(head_dim, layer.scheme->v.shape.head_dim);
    const formats::LayerScheme& scheme = *layer.scheme;
    const auto add = [&](const kernels::KeyKernel& kernel, int channels) {
      query_bytes = std::max(query_bytes, kernel.query_bytes(channels));
    };
    add(KeyKernelOf(kernels, scheme.k.format->code, scheme.k.format->scaling), scheme.k.shape.head_dim);
    add(kernels.exact_keys, scheme.k.shape.head_dim);
    add(UnquantizedKeyKernel(kernels, scheme.unquantized_format->code), scheme.UnquantizedShape().head_dim);
    for (const formats::AgeScheme& age : scheme.ages) {
      add(KeyKernelOf(kernels, age.k.format->code, age.k.format->scaling), age.k.shape.head_dim);
    }
    ages = std::max(ages, scheme.ages.size());
    if (!scheme.SharesCell()) continue;
    latent_bytes =
        std::max({latent_bytes, scheme.k.sections.row_bytes * scheme.shape.tokens, scheme.ExactCellBytes(scheme.k)});
    for (const formats::AgeScheme& age : scheme.ages) {
      latent_bytes = std::max(latent_bytes, age.k.sections.row_bytes * scheme.shape.tokens);
    }
  }
  const bool divides = std::ranges::any_of(layers, [](const LayerView& layer) { return layer.classes.of > 1; });
  const int totals = divides ? kTreeDepth : 1;
  const size_t queries = std::size(queries_) - std::size(cache::kAgedKinds) + ages;  // of later levels that there are
  if (memory_ && rows <= rows_ && query_bytes <= query_stride_) return;
  rows_ = rows;
  query_stride_ = query_bytes;
  const int64_t row_floats = Align(int64_t{4} * rows);
  const int64_t states = Align(static_cast<int64_t>(sizeof(SoftmaxState)) * rows);
  const int64_t out = Align(int64_t{4} * rows * head_dim);
  const int64_t scores = int64_t{4} * kPassRows * kMaxPageTokens;
  const auto arrays = static_cast<int64_t>(queries);
  const int64_t total = arrays * rows * query_bytes + (arrays + 1) * row_floats + (1 + totals) * (states + out) +
                        kWorkspaceAlignment + 2 * scores + kernels::kWorkspaceBytes + latent_bytes;
  memory_ = device.Allocate(static_cast<size_t>(total));
  uint8_t* next = memory_.data();
  const auto take = [&next](int64_t bytes) {
    uint8_t* start = next;
    next += bytes;
    return start;
  };
  for (size_t i = 0; i < std::size(queries_); ++i) {
    if (i < kUnquantized && IsAged(cache::kPageKinds[i]) && AgeIndex(cache::kPageKinds[i]) >= ages) continue;
    queries_[i] = take(rows * query_bytes);
    row_scale_[i] = reinterpret_cast<float*>(take(row_floats));
  }
  bias_ = reinterpret_cast<float*>(take(row_floats));
  split_state_ = reinterpret_cast<SoftmaxState*>(take(states));
  split_out_ = reinterpret_cast<float*>(take(out));
  for (int depth = 0; depth < totals; ++depth) {
    total_state_[depth] = reinterpret_cast<SoftmaxState*>(take(states));
    total_out_[depth] = reinterpret_cast<float*>(take(out));
  }
  rescale_ = reinterpret_cast<float*>(take(kWorkspaceAlignment));
  scores_ = reinterpret_cast<float*>(take(scores));
  unquantized_scores_ = reinterpret_cast<float*>(take(scores));
  workspace_ = take(kernels::kWorkspaceBytes);
  values_ = take(latent_bytes);
}

}  // namespace kvanta::attention
