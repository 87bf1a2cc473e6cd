// The units that this build has: all of the architecture, or a part of them (KVANTA_UNITS in cmake/KvantaLayer.cmake).
#pragma once

#include <initializer_list>
#include <string_view>

#ifndef KVANTA_LEFT_OUT_UNITS
#define KVANTA_LEFT_OUT_UNITS  // their names, with commas between
#endif

namespace kvanta::kernels {

// True if isa_<unit>.cc is compiled; the table of another unit must not be referred to.
constexpr bool IsBuilt(std::string_view unit) {
  for (const std::string_view left_out : std::initializer_list<std::string_view>{KVANTA_LEFT_OUT_UNITS}) {
    if (left_out == unit) return false;
  }
  return true;
}

}  // namespace kvanta::kernels
