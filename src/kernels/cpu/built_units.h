// The units that this build has: all of the architecture, or a part of them (KVANTA_UNITS in cmake/KvantaLayer.cmake).
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>

#ifndef KVANTA_LEFT_OUT_UNITS
#define KVANTA_LEFT_OUT_UNITS  // names, each followed by a comma
#endif

namespace kvanta::kernels {

inline constexpr std::string_view kLeftOutUnits[] = {KVANTA_LEFT_OUT_UNITS ""};

// True if isa_<unit>.cc is compiled; the table of another unit must not be referred to.
constexpr bool IsBuilt(std::string_view unit) {
  return std::ranges::find(kLeftOutUnits, unit) == std::end(kLeftOutUnits);
}

}  // namespace kvanta::kernels
