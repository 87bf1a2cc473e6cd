// Reference backend for tests: reads the same cache bytes as the others and computes attention over the dequantized
// values in double precision. Slow. Unlike the other backends, Run allocates memory: the dequantized rows (f32) of one
// KV head of one sequence at a time.
#pragma once

#include <memory>

#include "attention/backend.h"

namespace kvanta::attention {

// Throws InputError for a config that does not match the cache's layout. `pool` must outlive the backend.
std::unique_ptr<Backend> MakeReferenceBackend(cache::PagePool& pool, BackendConfig config);

}  // namespace kvanta::attention
