// The division of states among threads.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "base/thread_pool.h"
#include "kernels/linear_attention/cpu/table.h"

namespace kvanta::kernels {

// Calls update(head, first column) for each kDeltaColumns columns of `heads` states of `width` columns. A thread has
// whole heads where there are enough: columns are lines next to one another, which two cores would take from each
// other.
template <class Update>
void ForColumns(ThreadPool& threads, int64_t heads, int64_t width, Update update) noexcept {
  const int64_t columns = CeilDiv(width, int64_t{kDeltaColumns});
  const int64_t together = heads >= 4 * threads.Threads() ? columns : 1, parts = columns / together;
  auto task = [&](int64_t index, int) {
    for (int64_t i = 0; i < together; ++i) update(index / parts, (index % parts + i) * kDeltaColumns);
  };
  threads.ForEach(heads * parts, task);
}

}  // namespace kvanta::kernels
