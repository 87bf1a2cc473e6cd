// Runs a kernel's source on the host, each thread of a block as a fiber. Stops at errors and undefined behavior:
// divergent lanes in a warp-wide operation, shared memory accesses that are out of range, misaligned, uninitialized or
// racing, and asynchronous copies that are read before they were waited for.
#pragma once

#include <fmt/format.h>

#include <any>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cuda/types.h"

namespace kvanta::emulated {

using kernels::cuda::kWarp;

struct EmulationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct GridShape {
  int blocks = 1;
  int threads = kWarp;  // per block, a multiple of 32
  int shared_bytes = 0;
};

// Runs all blocks sequentially, in an order that changes from grid to grid: ascending, descending, from the middle on.
// Throws EmulationError.
void RunGrid(const GridShape& shape, const std::function<void()>& kernel);

template <class F>
void RunShape(const kernels::cuda::LaunchShape& shape, const F& kernel) {
  RunGrid({.blocks = static_cast<int>(shape.blocks), .threads = shape.threads, .shared_bytes = shape.shared_bytes},
          kernel);
}

// ---- within a kernel

int ThreadIndex() noexcept;
int BlockIndex() noexcept;
int Blocks() noexcept;

// Warp-wide operation: once all 32 lanes have called it, `execute` gets their operands, by lane. Lanes in operations of
// different names stop the kernel.
void WarpOperation(const char* name, void* operand, void (*execute)(void* const* operands));
void SyncWarp();
void SyncBlock();
// True in all threads of the block if `value` is in any of them; a block barrier.
bool AnyThread(bool value);

// Bytes [offset, offset + count) of shared memory, checked for this access. `alignment` in bytes. kAsyncRead: by a
// warpgroup's product, of bytes after whose stores their thread has fenced.
enum class Access : uint8_t { kRead, kWrite, kAsyncRead };
uint8_t* Shared(int64_t offset, int64_t count, int alignment, Access access);

// Asynchronous copies from global to shared memory: begin a copy, commit those so far as a group, wait until at most
// the `groups` newest groups are in flight. The bytes must not be accessed before the wait.
void BeginCopy(int64_t offset, const uint8_t* from, int count);
void CommitCopies();
void WaitForCopies(int groups);
// Before a barrier after which products read what this thread has stored.
void FenceStoresForProducts();
// State that a primitive keeps of this thread until its block ends.
std::any& ThreadState() noexcept;

// Stops the kernel with an error that names the thread. Objects on the caller's stack are not destroyed.
[[noreturn]] void StopWith(fmt::string_view format, fmt::format_args values);
template <class... T>
[[noreturn]] void Stop(fmt::format_string<T...> format, const T&... values) {
  StopWith(static_cast<fmt::string_view>(format), fmt::make_format_args(values...));
}
// Stops if a pointer to global memory is not a multiple of `alignment`.
void CheckAlignment(const void* pointer, size_t alignment);

}  // namespace kvanta::emulated
