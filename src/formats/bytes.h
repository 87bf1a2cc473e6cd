// Little-endian loads and stores of bytes in a cell, which may be unaligned.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace kvanta::formats {

static_assert(std::endian::native == std::endian::little, "cells are little endian");

template <class T>
KVANTA_HD T LoadBytes(const uint8_t* bytes) noexcept {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

template <class T>
KVANTA_HD void StoreBytes(uint8_t* bytes, T value) noexcept {
  std::memcpy(bytes, &value, sizeof(T));
}

}  // namespace kvanta::formats
