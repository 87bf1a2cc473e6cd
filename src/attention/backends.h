// The list of attention backends. A new one is its file, and its line in backends.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/backend.h"
#include "base/thread_pool.h"

namespace kvanta::attention {

// Names of the backends that this machine runs, best first: "cpu-avx2", "cpu-portable", "cuda-sm90", "reference". Those
// of a GPU need a store that lies in its memory (kernels/cuda/cuda_context.h).
std::vector<std::string> BackendNames();

// name: one of BackendNames(), or "auto": the best, or what KVANTA_ISA forces. Throws InputError listing the names.
// `store` must outlive the backend.
std::unique_ptr<Backend> MakeBackend(std::string_view name, cache::PagePool& store, BackendConfig config,
                                     std::shared_ptr<ThreadPool> threads);

}  // namespace kvanta::attention
