// What a step's launches read from the device's memory: arrays side by side, brought there by one copy. Launches that
// were recorded know the block's address, and find the rest from its head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/device.h"

namespace kvanta::attention {

class StepMetadata {
 public:
  // Begins a new step, with `head_bytes` of zeros.
  void Begin(size_t head_bytes) { bytes_.assign(Aligned(head_bytes), 0); }

  // Returns where the values will lie from the block's address on.
  template <class T>
  size_t Add(const std::vector<T>& values) {
    const size_t at = bytes_.size();
    bytes_.resize(at + Aligned(values.size() * sizeof(T)));
    if (!values.empty()) std::memcpy(bytes_.data() + at, values.data(), values.size() * sizeof(T));
    return at;
  }

  // Memory for all that was added; whether it is another than before.
  bool Reserve(Device& device) {
    if (memory_.bytes() >= bytes_.size()) return false;
    memory_ = device.Allocate(std::max(kMinBytes, 2 * bytes_.size()));
    return true;
  }
  uint8_t* Address() const noexcept { return memory_.data(); }

  // After Reserve: a part of the head.
  template <class T>
  void Write(size_t at, const T& value) {
    std::memcpy(bytes_.data() + at, &value, sizeof(value));
  }

  void Copy(Device& device) { device.CopyIn(memory_.data(), bytes_.data(), bytes_.size()); }

 private:
  static constexpr size_t kMinBytes = 1024;
  static constexpr size_t Aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

  std::vector<uint8_t> bytes_;
  Buffer memory_;
};

}  // namespace kvanta::attention
