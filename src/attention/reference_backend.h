// The oracle as a backend: the same bytes in the cache, attention over what they stand for in double precision. Slow
// and plain; for tests, and for anyone who wants to know what the right answer is. Unlike a real backend its Run takes
// memory for the decoded rows (f32, of one KV head of one sequence at a time).
#pragma once

#include <memory>

#include "attention/backend.h"

namespace kvanta::attention {

// Throws InputError where config and the cache's layout do not fit together. `store` must outlive the backend.
std::unique_ptr<Backend> MakeReferenceBackend(cache::PagePool& store, BackendConfig config);

}  // namespace kvanta::attention
