// A read-only memory map of a regular file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvanta {

// Move-only. A file that another process shortens while it is mapped raises SIGBUS on access: model files must not
// change while they are read.
class MemoryMap {
 public:
  MemoryMap() = default;
  // Throws InputError when the path is missing, unreadable or not a regular file; ResourceError when mapping fails.
  explicit MemoryMap(const std::string& path);
  ~MemoryMap();
  MemoryMap(MemoryMap&& other) noexcept;
  MemoryMap& operator=(MemoryMap&& other) noexcept;
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  std::span<const uint8_t> Bytes() const noexcept { return {data_, bytes_}; }
  // Time of the file's last change, in nanoseconds since 1970.
  int64_t ModifiedNs() const noexcept { return modified_ns_; }
  // Gives back the memory of the pages around `bytes`; a later access reads them from the file again. Bytes outside of
  // the map are ignored.
  void ReleasePages(std::span<const uint8_t> bytes) const noexcept;
  // Likewise, and evicts them from the page cache unless another process maps them.
  void EvictPages(std::span<const uint8_t> bytes) const noexcept;

 private:
  bool Contains(std::span<const uint8_t> bytes) const noexcept {
    return !bytes.empty() && bytes.data() >= data_ && bytes.data() + bytes.size() <= data_ + bytes_;
  }

  int file_ = -1;
  const uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  int64_t modified_ns_ = 0;
};

}  // namespace kvanta
