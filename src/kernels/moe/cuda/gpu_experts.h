// A layer of experts on a GPU: the rows of each expert lie together, in tiles of their own, so that all experts are one
// launch of the linear layers' kernels.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/linear/cuda/gpu_linear.h"
#include "kernels/moe/moe_layer.h"

namespace kvanta::kernels {

// The experts are of one shape and kind, made by the same Ops as `context`. Throws ResourceError.
std::unique_ptr<ExpertLayer> MakeGpuExperts(std::shared_ptr<GpuLinearContext> context,
                                            std::vector<ExpertWeights> experts, const MoeConfig& moe,
                                            std::span<const float> e_score_correction_bias);

}  // namespace kvanta::kernels
