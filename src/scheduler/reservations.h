// Memory that is reserved for waiting sequences while their stored prefixes are loaded, and until they run: neither
// pages that were loaded nor the space for the rest go to sequences after them. A reservation never holds up a
// sequence before it in the queue, nor a running one: where these need the memory, the last reservations end.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "scheduler/sequence.h"

namespace kvanta::scheduler {

class Reservations {
 public:
  // `cache` must outlive the object.
  explicit Reservations(cache::KvCacheManager& cache) : cache_(cache) {}

  // Reserves the memory of all tokens of `sequence`, with the pages that the cache has of its prefix, if it has
  // `other_bytes` more; false, without a reservation, if not.
  bool Add(Sequence& sequence, int64_t other_bytes);
  void End(Sequence& sequence) noexcept;
  // Ends the last reservation; false if there is none after `sequence`, or none at all.
  bool EndLastBehind(const Sequence* sequence) noexcept;
  // Ends the last reservations while the cache lacks memory for what they still need.
  void Trim() noexcept;
  // True if `bytes` more are available to `sequence`. Reservations after it end if that makes them so.
  bool MakeRoom(const Sequence& sequence, int64_t bytes) noexcept;

  int64_t Count() const noexcept { return static_cast<int64_t>(sequences_.size()); }
  bool HasBefore(const Sequence& sequence) const noexcept;
  // Bytes of the cache that are left by the reservations before `sequence`, or by all.
  int64_t AvailableBytes(const Sequence* sequence = nullptr) const noexcept;

 private:
  cache::KvCacheManager& cache_;
  std::vector<Sequence*> sequences_;  // with a reservation, in queue order
};

}  // namespace kvanta::scheduler
