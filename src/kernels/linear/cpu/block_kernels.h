// Kernels of all formats of W in blocks, of one ISA unit.
#pragma once

#include "kernels/linear/cpu/block_weight.h"
#include "kernels/linear/cpu/kernels.h"

namespace kvanta::kernels {
namespace {

template <int kFormat = 1>
constexpr void SetBlockKernels(BlockKernels& kernels) {
  if constexpr (kFormat < weights::kBlockFormats) {
    kernels.of[kFormat][0] = kWeightKernels<BlockWeight<kBlockLayouts[kFormat], false>>;
    kernels.of[kFormat][1] = kWeightKernels<BlockWeight<kBlockLayouts[kFormat], true>>;
    SetBlockKernels<kFormat + 1>(kernels);
  }
}
constexpr BlockKernels MakeBlockKernels() {
  BlockKernels kernels{};
  SetBlockKernels(kernels);
  return kernels;
}

}  // namespace
}  // namespace kvanta::kernels
