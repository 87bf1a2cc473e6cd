// Division of work among threads: a parallel region costs a few microseconds, so smaller work is not split.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.h"

namespace kvanta::kernels {

// Smallest tasks: values that are read or written once, and products that are added to sums.
inline constexpr int64_t kMinTaskValues = 1 << 14;
inline constexpr int64_t kMinTaskMacs = 1 << 16;

// Calls fn(first, end) for parts of `count` items of `values` values each, in parallel where it pays.
template <class Function>
void ForParts(ThreadPool& threads, int64_t count, int64_t values, Function fn) {
  const int64_t tasks = std::clamp<int64_t>(count * values / kMinTaskValues, 1, std::max<int64_t>(count, 1));
  auto run = [&](int64_t task, int) { fn(task * count / tasks, (task + 1) * count / tasks); };
  threads.ForEach(tasks, run);
}

}  // namespace kvanta::kernels
