// Registry of attention backends. A new backend needs one line in backends.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/backend.h"
#include "base/thread_pool.h"

namespace kvanta::attention {

// Names of the backends that this machine supports, best first: "cpu-avx2", "cpu-portable", "cuda-sm90", "reference".
// CUDA backends need a page pool in GPU memory (kernels/cuda/cuda_context.h).
std::vector<std::string> BackendNames();

// Families of backends, "cpu", "cuda" and "reference", that attend to a format as it is stored, on K and V; whether
// this machine runs them or not.
std::vector<std::string> BackendFamiliesOf(const formats::Format& format);

// Creates a backend. name: one of BackendNames(), or "auto" for the best CPU backend (KVANTA_ISA overrides it). Throws
// InputError for an unknown name. `pool` must outlive the backend.
std::unique_ptr<Backend> MakeBackend(std::string_view name, cache::PagePool& pool, BackendConfig config,
                                     std::shared_ptr<ThreadPool> threads);

}  // namespace kvanta::attention
