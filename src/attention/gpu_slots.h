// Places of a step's rows in the cache on a GPU, and the pages that attention reads.
#pragma once

#include <vector>

#include "attention/gpu_plan.h"

namespace kvanta::attention {

// Slots of new rows and all slots of pages that close, by KV cache group; and those of the entries that end in the
// step.
void FillSlots(const std::vector<EntryRows>& entries, int page_size, GpuPlan& plan);
// The sequences' block tables, by KV cache group.
void FillPages(int page_size, GpuPlan& plan);

}  // namespace kvanta::attention
