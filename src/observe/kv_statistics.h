// Statistics of a text's keys and values, for calibration: magnitudes and moments per layer, side, head and channel.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvanta/stats.h"
#include "observe/kv_observer.h"

namespace kvanta::observe {

// Bins of KvStatistics::histogram: 64 per octave of magnitude, from 2^-40 up to 2^40. The first also counts smaller
// magnitudes, zero included, the last larger ones.
inline constexpr int kBinsPerOctave = 64, kLowestExponent = -40, kHighestExponent = 40;
inline constexpr int kMagnitudeBins = (kHighestExponent - kLowestExponent) * kBinsPerOctave;

// Bin of a finite magnitude >= 0.
int MagnitudeBin(float magnitude) noexcept;
// Lower edge of a bin; of kMagnitudeBins, the upper edge of the last one.
float MagnitudeEdge(int bin) noexcept;

// Forwards `tokens` as one sequence. key_means: f32 [layers][kv_heads][head_dim], subtracted from K before anything is
// counted; empty: none. The sizes are the result's, those of the layer with most. Throws InputError naming the layer
// when a key or a value is not finite.
KvStatistics CollectKvStatistics(models::Model& model, const BackendFactory& make_backend,
                                 const formats::CacheLayout& layout, std::span<const int32_t> tokens,
                                 std::span<const float> key_means, int64_t max_rows);

}  // namespace kvanta::observe
