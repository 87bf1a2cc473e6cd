// A layer of experts on the host: rows are grouped by expert, and a group's products with all of its experts share
// parallel regions, so that a decode step, which has one row per expert, occupies all threads.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/linear/cpu/packed_linear.h"
#include "kernels/moe/moe_layer.h"

namespace kvanta::kernels {

// The experts, this rank's part of them, have one shape and were made by the Ops of `context`. Throws ResourceError.
std::unique_ptr<ExpertLayer> MakeCpuExperts(std::shared_ptr<LinearContext> context, std::vector<ExpertWeights> experts,
                                            const MoeConfig& moe, const RouterVectors& router,
                                            const ExpertDivision& division);

}  // namespace kvanta::kernels
