// Recurrent layers on a GPU (semantics: kernels/ops.h): a convolution, a recurrence over the states, a gated norm.
#pragma once

#include "kernels/cuda/cuda_context.h"

namespace kvanta::kernels {

void GpuGatedDeltaNet(const GatedDeltaNetOp& op, CudaContext& gpu) noexcept;
void GpuMamba2(const Mamba2Op& op, CudaContext& gpu) noexcept;
void GpuShortConv(const ShortConvOp& op, CudaContext& gpu) noexcept;

}  // namespace kvanta::kernels
