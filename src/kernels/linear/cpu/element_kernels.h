// Kernels of the storages of W as elements, of one ISA unit.
#pragma once

#include "kernels/linear/cpu/kernels.h"
#include "kernels/linear/cpu/weights.h"

namespace kvanta::kernels {
namespace {

constexpr LinearKernels MakeLinearKernels(const BlockKernels& blocks, const QuantizedKernels& quantized) {
  return {.bf16 = kWeightKernels<Bf16Weight>,
          .f32 = kWeightKernels<F32Weight>,
          .f16 = kWeightKernels<F16Weight>,
          .blocks = &blocks,
          .quantized = &quantized};
}

}  // namespace
}  // namespace kvanta::kernels
