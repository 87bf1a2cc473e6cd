// A block's share of a step's attention. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {

// Calls attend(task) for the tasks of the block's work items.
template <class Attend>
KVANTA_DEVICE void ForTasks(const AttentionMetadata& metadata, Attend attend) {
  for (int item = BlockIndex(); item < metadata.work_count; item += Blocks()) {
    const int end = metadata.work_indptr[item + 1];
    for (int index = metadata.work_indptr[item]; index < end; ++index) attend(metadata.tasks[index]);
  }
}

}  // namespace kvanta::kernels::cuda
