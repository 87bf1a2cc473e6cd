// A step's launch arguments in device memory: a header and arrays in one block, uploaded by one copy. Captured launches
// hold the block's address and reach the arrays through the header.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/device.h"
#include "base/math.h"

namespace kvanta::attention {

// Grows `buffer` to at least `bytes`; contents are lost.
inline void Grow(Device& device, Buffer& buffer, int64_t bytes) {
  const auto requested = static_cast<size_t>(bytes);
  if (buffer.bytes() < requested) buffer = device.Allocate(requested + requested / 2);
}

class StepMetadata {
 public:
  // Starts a new step with a zeroed header.
  void Begin(size_t header_bytes) { bytes_.assign(Align(header_bytes), 0); }

  // Appends an array and returns its offset from the block's address.
  template <class T>
  size_t Add(const std::vector<T>& values) {
    const size_t offset = bytes_.size();
    bytes_.resize(offset + Align(values.size() * sizeof(T)));
    if (!values.empty()) std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
    return offset;
  }

  // Allocates device memory for the block. Returns true if its address changed.
  bool Reserve(Device& device) {
    if (memory_.bytes() >= bytes_.size()) return false;
    memory_ = device.Allocate(std::max(kMinBytes, 2 * bytes_.size()));
    return true;
  }
  uint8_t* Address() const noexcept { return memory_.data(); }

  // Writes a header field; after Reserve.
  template <class T>
  void Write(size_t offset, const T& value) {
    std::memcpy(bytes_.data() + offset, &value, sizeof(value));
  }
  // Replaces an array by one that is not longer.
  template <class T>
  void Replace(size_t offset, const std::vector<T>& values) noexcept {
    if (!values.empty()) std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
  }

  void Upload(Device& device) { device.CopyIn(memory_.data(), bytes_.data(), bytes_.size()); }

 private:
  static constexpr size_t kMinBytes = 1024;
  static constexpr size_t Align(size_t bytes) { return static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), 16)); }

  std::vector<uint8_t> bytes_;
  Buffer memory_;
};

}  // namespace kvanta::attention
