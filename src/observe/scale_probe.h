// Probe of the keys and values that a model produces: the largest magnitude per layer and head, and how many values
// saturate or become zero at the cache's static scales. It runs on an unquantized cache of its own.
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
  int64_t saturated = 0, zeroed = 0;  // at the side's scales; the latter are not zero before (static formats only)
  bool finite = true;
};

struct LayerProbe {
  SideProbe k;
  SideProbe v;
};

// Forwards `tokens`, at most max_rows at a time. `layout` is the engine's (formats, transforms).
std::vector<LayerProbe> ProbeKv(models::Model& model, const BackendFactory& make_backend,
                                const formats::CacheLayout& layout, const std::vector<formats::LayerScales>& scales,
                                std::span<const int32_t> tokens, int64_t max_rows);

// Largest finite value of a format with static scales, found by encoding infinity.
float LargestFinite(const formats::Format& format);
// Largest power of two that the format stores as zero.
float LargestZero(const formats::Format& format);

// Values that a probe saw in the sides with static scales, and what is wrong with the scales.
struct ScaleFit {
  double saturated = 0, zeroed = 0;  // shares of the values
  double max_zeroed = 0;             // the largest share of a side
  std::string max_zeroed_side;       // "V of layer 3"

  // A side of which this share becomes zero has lost as much to underflow as E4M3 loses to rounding: the distance of
  // its subnormal codes is an eighth of such values' deviation.
  static constexpr double kMaxZeroed = 0.05;
  bool Fits() const noexcept { return saturated == 0 && max_zeroed <= kMaxZeroed; }
};
ScaleFit FitOf(const std::vector<LayerProbe>& probe, const formats::CacheLayout& layout);

// True if the side's bytes depend on a static scale.
bool IsStatic(const formats::Side& side);
bool HasStaticScales(const formats::CacheLayout& layout);

// Sets scales with a factor of two of headroom above the probe's magnitudes: a floating-point format loses no precision
// by it, and later tokens exceed the probe's. Throws InputError naming the layer when a value was not finite.
void ApplyProbe(const std::vector<LayerProbe>& probe, const formats::CacheLayout& layout,
                std::vector<formats::LayerScales>& scales);

// "0-29": the layers with static sides, as ranges.
std::string StaticLayers(const formats::CacheLayout& layout);

}  // namespace kvanta::observe
