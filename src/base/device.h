// Memory of a device: weights, activations and cache pages. Layers above `kernels` do not depend on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace kvanta {

// Memory of a device, freed with the last of the buffers that share it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::shared_ptr<void> data, size_t bytes) : data_(std::move(data)), bytes_(bytes) {}
  uint8_t* data() const noexcept { return static_cast<uint8_t*>(data_.get()); }
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data_.get());
  }
  size_t bytes() const noexcept { return bytes_; }
  // The range [offset, offset + bytes), which must be inside; the memory is freed with its last part.
  Buffer Part(size_t offset, size_t bytes) const { return {std::shared_ptr<void>(data_, data() + offset), bytes}; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::shared_ptr<void> data_;
  size_t bytes_ = 0;
};

// A reserved address range whose memory is committed and released piecewise: page pools of different record sizes can
// share one byte budget without fragmentation.
class Reservation {
 public:
  virtual ~Reservation() = default;
  virtual uint8_t* data() const noexcept = 0;
  virtual size_t bytes() const noexcept = 0;
  // Commits memory for [offset, offset + bytes): required before its first use and after Release. False if none is
  // left. (On the CPU the first touch commits.)
  virtual bool Commit(size_t offset, size_t bytes) noexcept = 0;
  // Returns the memory of a committed part to the system; contents become undefined.
  virtual void Release(size_t offset, size_t bytes) noexcept = 0;
  // Bytes that Commit of this part would take, and that Release of it would give back: whole mapping granules, which
  // other parts may share, where the device has them.
  virtual size_t BytesToCommit(size_t /*offset*/, size_t bytes) const noexcept { return bytes; }
  virtual size_t BytesToRelease(size_t /*offset*/, size_t bytes) const noexcept { return bytes; }
  // Size of a mapping granule, bytes.
  virtual size_t Granularity() const noexcept { return 1; }
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string_view Name() const noexcept = 0;  // "cpu", "cuda:0"
  // Zeroed memory, 64-byte aligned (2 MiB when large). Throws ResourceError with the sizes if memory does not suffice.
  virtual Buffer Allocate(size_t bytes) = 0;
  virtual std::unique_ptr<Reservation> Reserve(size_t bytes) = 0;
  // Memory of the host for CopyInAsync and CopyOutAsync; from and to elsewhere a copy may be slower.
  virtual Buffer AllocateHost(size_t bytes);
  // host -> device; the host's bytes have been taken when it comes back.
  virtual void CopyIn(void* device, const void* host, size_t bytes) = 0;
  virtual void CopyOut(void* host, const void* device, size_t bytes) = 0;  // device -> host
  // The same two, but the bytes are valid only after Synchronize; until then `host` must live, and keep what is copied.
  virtual void CopyInAsync(void* device, const void* host, size_t bytes) { CopyIn(device, host, bytes); }
  virtual void CopyOutAsync(void* host, const void* device, size_t bytes) { CopyOut(host, device, bytes); }
  virtual void Synchronize() {}
  virtual void Fill(void* device, uint8_t byte, size_t bytes) = 0;
  // Memory a new cache may take, bytes (CPU: MemAvailable of the system or the cgroup's rest, whichever is less).
  virtual int64_t AvailableBytes() const = 0;
};

// The host's memory. One object for the process.
Device& Cpu();

inline Buffer Device::AllocateHost(size_t bytes) {
  return Cpu().Allocate(bytes);
}

}  // namespace kvanta
