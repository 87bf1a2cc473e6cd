// Allocations that fail: replaces operator new of the program, so that one file of it may include this.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

// Allocations of this thread until failures begin; negative: none will fail.
inline thread_local int64_t allocations_left = -1;
inline thread_local int64_t failures_left = 0;

inline bool FailsNow() noexcept {
  if (allocations_left < 0) return false;
  if (allocations_left > 0) {
    --allocations_left;
    return false;
  }
  if (--failures_left == 0) allocations_left = -1;
  return true;
}

// Not inlined: a compiler that sees free() of what new returned warns.
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (FailsNow()) throw std::bad_alloc();
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
