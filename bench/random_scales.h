// Scales of a benchmark's layers, as calibration would give them: key means, matrices of +query, klt3 and klt2, outlier
// channels.
#pragma once

#include <cstdint>

#include "formats/scheme.h"

namespace kvanta {

// For keys of NormalValues(), which keep their distribution: the matrices are reflections, the means 1/4 at most, and
// outlier channels the first ones.
formats::LayerScales RandomScales(const formats::LayerScheme& layer, uint32_t seed);

}  // namespace kvanta
