// Runs a kernel's source on the host: every thread of a block is a fiber; what a warp does together is a meeting of its
// 32 lanes. It stops at what a GPU would punish or leave undefined: lanes of a warp that meet at different places or
// never, shared memory beyond its end, misaligned, read before it was written, or touched by two threads without a
// barrier between them, copies that are read before they were waited for.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/attention/cuda/launch_shape.h"
#include "kernels/cuda/vec.h"

namespace kvanta::emulated {

using kernels::cuda::kWarp;

struct EmulationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct GridShape {
  int blocks = 1;
  int threads = kWarp;  // of a block, a multiple of 32
  int shared_bytes = 0;
};

// Runs all blocks, one after the other. Throws EmulationError.
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

// Meets the other lanes of the warp. When all have come, `act` gets the operands of all 32, by lane. `what` names the
// place; lanes that meet at different ones stop the kernel.
void Multiply(const char* what, void* operands, void (*act)(void* const* operands));
void SyncWarp();
void SyncBlock();

// The bytes [offset, offset + count) of shared memory, checked for this access. `alignment` in bytes.
enum class Access : uint8_t { kRead, kWrite };
uint8_t* Shared(int64_t offset, int64_t count, int alignment, Access access);

// Copies of a thread from global to shared memory: begun, made a group of, and waited for until at most `groups` of the
// newest are under way. Until then nobody may touch the bytes.
void BeginCopy(int64_t offset, const uint8_t* from, int count);
void CommitCopies();
void WaitForCopies(int groups);

// Stops the kernel with the thread and the reason. What the caller's stack holds is not destroyed.
[[noreturn]] void StopWith(fmt::string_view format, fmt::format_args values);
template <class... T>
[[noreturn]] void Stop(fmt::format_string<T...> format, const T&... values) {
  StopWith(static_cast<fmt::string_view>(format), fmt::make_format_args(values...));
}
// Stops where a pointer to global memory is not a multiple of `alignment`.
void CheckAlignment(const void* pointer, size_t alignment);

}  // namespace kvanta::emulated
