// Kernels of all storages of W in blocks, of one ISA unit.
#pragma once

#include "kernels/linear/cpu/block_weight.h"
#include "kernels/linear/cpu/kernels.h"

namespace kvanta::kernels {
namespace {

template <int kStorage = 0>
constexpr void SetBlockKernels(BlockKernels& kernels) {
  if constexpr (kStorage < kBlockStorages) {
    kernels.of[kStorage][0] = kWeightKernels<BlockWeight<kBlockLayouts[kStorage], false>>;
    kernels.of[kStorage][1] = kWeightKernels<BlockWeight<kBlockLayouts[kStorage], true>>;
    SetBlockKernels<kStorage + 1>(kernels);
  }
}
constexpr BlockKernels MakeBlockKernels() {
  BlockKernels kernels{};
  SetBlockKernels(kernels);
  return kernels;
}

}  // namespace
}  // namespace kvanta::kernels
