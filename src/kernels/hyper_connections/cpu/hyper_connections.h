// Hyper-connections on the host (semantics: kernels/ops.h).
#pragma once

#include "base/thread_pool.h"
#include "kernels/hyper_connections/hyper_connections.h"

namespace kvanta::kernels {

void MakeStreamWeights(const HyperConnectionShape& shape, const StreamParameters& parameters, int64_t rows,
                       ThreadPool& threads, float* weights) noexcept;
void CollapseStreams(const HyperConnectionShape& shape, const float* streams, const float* weights, int64_t rows,
                     ThreadPool& threads, float* out) noexcept;
void ExpandStreams(const HyperConnectionShape& shape, const float* weights, const float* x, int64_t rows,
                   ThreadPool& threads, float* streams) noexcept;

}  // namespace kvanta::kernels
