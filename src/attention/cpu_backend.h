// CPU attention on the paged, quantized KV cache with the kernels of one instruction set.
#pragma once

#include <memory>

#include "attention/backend.h"
#include "base/thread_pool.h"

namespace kvanta::kernels {
struct IsaTable;
}

namespace kvanta::attention {

// isa: "auto" or a unit's name, "avx2" for example (kernels/cpu/select.h). Throws InputError for an unknown or
// unsupported instruction set and for a config that does not match the cache's layout. `pool` must outlive the backend.
std::unique_ptr<Backend> MakeCpuBackend(cache::PagePool& pool, BackendConfig config,
                                        std::shared_ptr<ThreadPool> threads, const char* isa = "auto");

// Same with the given kernels; the CPU must support their instruction set.
std::unique_ptr<Backend> MakeCpuBackend(cache::PagePool& pool, BackendConfig config,
                                        std::shared_ptr<ThreadPool> threads, const kernels::IsaTable& isa);

// True if there are kernels for the layer's formats: on every instruction set, or on none.
bool CpuSupports(const formats::LayerScheme& layer);

}  // namespace kvanta::attention
