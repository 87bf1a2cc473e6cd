// Attention on the host's CPU, in pages of quantized cells, with the kernels of the chosen ISA unit.
#pragma once

#include <memory>

#include "attention/backend.h"
#include "base/thread_pool.h"

namespace kvanta::kernels {
struct IsaTable;
}

namespace kvanta::attention {

// isa: "auto", "amx", "avx512", "avx2" or "portable" (kernels/cpu/select.h). Throws InputError for an unknown or
// unrunnable unit, or where config and the cache's layout do not fit together. `store` must outlive the backend.
std::unique_ptr<Backend> MakeCpuBackend(cache::PagePool& store, BackendConfig config,
                                        std::shared_ptr<ThreadPool> threads, const char* isa = "auto");

// The same with the kernels of a given unit, which this CPU must be able to run.
std::unique_ptr<Backend> MakeCpuBackend(cache::PagePool& store, BackendConfig config,
                                        std::shared_ptr<ThreadPool> threads, const kernels::IsaTable& isa);

}  // namespace kvanta::attention
