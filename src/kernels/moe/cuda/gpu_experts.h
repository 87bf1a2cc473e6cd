// An MoE layer on a GPU: rows are permuted by expert into tiles of one expert each, so that all experts are one grouped
// GEMM.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/linear/cuda/gpu_linear.h"
#include "kernels/moe/moe_layer.h"

namespace kvanta::kernels {

// The experts have one shape and kind and were made by `context`'s Ops; `division`: not by experts. Throws InputError,
// ResourceError.
std::unique_ptr<ExpertLayer> MakeGpuExperts(std::shared_ptr<GpuLinearContext> context,
                                            std::vector<ExpertWeights> experts, const MoeConfig& moe,
                                            const RouterVectors& router, const ExpertDivision& division);

}  // namespace kvanta::kernels
