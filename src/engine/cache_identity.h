// Identity of cached pages outside of the engine: all that their bytes depend on besides their token ids.
#pragma once

#include <string>

#include "engine/components.h"

namespace kvanta::engine {

// Version of the arithmetic: to be raised whenever a page's bytes for the same weights and tokens change, so that pages
// of earlier builds are not found any more. A test compares the bytes with those recorded for this version.
inline constexpr int kNumericsVersion = 3;
// The same for what changes on GPUs alone.
inline constexpr int kGpuNumericsVersion = 2;

// JSON. Of weights without components.weights_hash, it has the fast hash of page files alone.
std::string CacheIdentity(const EngineComponents& components);

}  // namespace kvanta::engine
