// Probe of the keys and values that a model produces: the largest magnitude per layer and head, and how many values
// saturate at a scale of 1.0. It runs on an unquantized cache of its own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/scheme.h"
#include "observe/kv_observer.h"

namespace kvanta::observe {

// One side of one layer, in the space in which it is encoded: T(x - mean).
struct SideProbe {
  std::vector<float> amax;  // [kv_heads]
  int64_t values = 0;
  int64_t above_unit = 0;  // values that saturate at scale 1.0 (static formats only)
  bool finite = true;
};

struct LayerProbe {
  SideProbe k;
  SideProbe v;
};

inline constexpr int64_t kMaxProbedTokens = 2048;  // probed tokens of a prompt: bounds the probe's memory

// Forwards the first kMaxProbedTokens of `tokens`, at most max_rows at a time. `layout` is the engine's (formats,
// transforms); `scales` holds the means.
std::vector<LayerProbe> ProbeKv(models::Model& model, const BackendFactory& make_backend,
                                const formats::CacheLayout& layout, const std::vector<formats::LayerScales>& scales,
                                std::span<const int32_t> tokens, int64_t max_rows);

// Largest finite value of a format with static scales, found by encoding infinity.
float LargestFinite(const formats::Format& format);

// True if the side's bytes depend on a static scale.
bool IsStatic(const formats::Side& side);
bool HasStaticScales(const formats::CacheLayout& layout);

// Sets scales with a factor of two of headroom above the probe's magnitudes: a floating-point format loses no precision
// by it, and later tokens exceed the first prompt's. Throws InputError naming the layer when a value was not finite.
void ApplyProbe(const std::vector<LayerProbe>& probe, const formats::CacheLayout& layout,
                std::vector<formats::LayerScales>& scales);

// "0-29": the layers with static sides, as ranges.
std::string StaticLayers(const formats::CacheLayout& layout);

}  // namespace kvanta::observe
