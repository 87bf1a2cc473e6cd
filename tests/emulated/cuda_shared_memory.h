// Shared memory of a block on the emulated grid (cuda_grid.h), with the history of its bytes: accesses that race, that
// read what was not written, or that do not wait for a copy stop the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "emulated/cuda_grid.h"

namespace kvanta::emulated {

// Thread and time of an access. Accesses of different threads are ordered by a block barrier between them or, within a
// warp, by a warp barrier.
struct SharedAccess {
  int thread = -1;
  int block_time = 0;  // block barriers so far
  int warp_time = 0;   // warp barriers so far
};

class SharedMemory {
 public:
  SharedMemory(int bytes, int threads);

  // Forgets all contents, for a block.
  void Reset();
  // Stops the kernel if the access is out of range, misaligned or not ordered with those before.
  uint8_t* At(int64_t offset, int64_t count, int alignment, Access access, const SharedAccess& now);
  // Says that an asynchronous copy to these bytes is in flight, or no longer.
  void SetCopyPending(int64_t offset, int64_t count, bool pending);
  // A thread's stores so far may be read by products.
  void FenceStores(int thread) { fences_[static_cast<size_t>(thread)] = stores_; }

 private:
  struct History {
    SharedAccess written;
    SharedAccess read;
    bool many_lanes = false;  // read by several lanes of the warp since read.warp_time
    bool many_warps = false;  // read by several warps since read.block_time
    bool copy_pending = false;
    int64_t store = 0;  // index of the last store
  };
  // Four aligned bytes have one history while every access is to all of them.
  struct WordHistory {
    History all = {};
    bool by_byte = false;
    int run = 0;  // runs_ at the first access
  };
  static constexpr int kWordBytes = 4;

  void Record(History& history, int64_t at, Access access, const SharedAccess& now) const;
  // Calls f for each history of the bytes [offset, offset + count), with the offset of its first byte.
  template <class F>
  void Visit(int64_t offset, int64_t count, F f);

  int bytes_;
  std::unique_ptr<uint8_t[]> memory_;  // exactly the requested size, for asan
  uint8_t* data_ = nullptr;
  std::vector<WordHistory> words_;
  std::vector<History> byte_histories_;  // where a word has one by byte
  std::vector<int64_t> fences_;          // by thread: stores_ at the last FenceStores
  int runs_ = 0;                         // calls of Reset
  int64_t stores_ = 0;                   // so far
};

}  // namespace kvanta::emulated
