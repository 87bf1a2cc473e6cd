// Second moments of a text's keys and queries, from which `kvanta calibrate --query` makes the matrices of +query.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"
#include "kvanta/stats.h"
#include "observe/kv_observer.h"

namespace kvanta::observe {

// Forwards `tokens` as one sequence. Sums are in double, in the order of positions, so they depend neither on threads
// nor on chunks. Throws InputError for models without separate K and V, and naming the layer when a value is
// not finite. weighted: with QueryMoments::weighted_query_moment. context_lengths: as of Engine::CollectQueryMoments.
// positions: length of the model's rope tables.
QueryMoments CollectQueryMoments(models::Model& model, const BackendFactory& make_backend,
                                 const formats::CacheLayout& layout, std::span<const int32_t> tokens, int64_t max_rows,
                                 bool weighted, std::span<const int64_t> context_lengths, int64_t positions,
                                 ThreadPool& threads);

}  // namespace kvanta::observe
