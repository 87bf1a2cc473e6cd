// Memory of the host from which blocks of any size are allocated: page-locked where the device wants that, so that
// copies between it and a GPU need no staging. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/device.h"

namespace kvanta::store {

class HostArena : public std::enable_shared_from_this<HostArena> {
 public:
  // Takes `bytes` of the host's memory at once. Throws ResourceError with the sizes if they cannot be had.
  static std::shared_ptr<HostArena> Make(Device& device, int64_t bytes);
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Block of uninitialized memory, freed with its last copy, which shares the arena. Empty if no free range is as long.
  Buffer Allocate(int64_t bytes);
  bool Owns(const Buffer& block) const noexcept;

  int64_t Bytes() const noexcept { return static_cast<int64_t>(memory_.bytes()); }
  // Bytes of all blocks, rounded up to their alignment.
  int64_t UsedBytes() const;

 private:
  using Ranges = std::map<size_t, size_t>;            // offset -> bytes
  using Sizes = std::set<std::pair<size_t, size_t>>;  // bytes, offset
  struct Block;

  explicit HostArena(Buffer memory);
  bool Take(Block& block);
  void Free(Block& block) noexcept;

  const Buffer memory_;
  mutable std::mutex mutex_;
  Ranges free_;  // maximal ranges
  Sizes free_by_size_;
  int64_t used_bytes_ = 0;
};

}  // namespace kvanta::store
