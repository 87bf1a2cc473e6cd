// The kernels of an instruction set for the formats of a layer's records.
#pragma once

#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

constexpr int Index(formats::ElementType code) {
  return static_cast<int>(code);
}

inline const kernels::KeyKernel& KeyKernelOf(const kernels::AttentionKernels& kernels, formats::ElementType code,
                                             const formats::Scaling& scaling) noexcept {
  return (scaling.token_group != 0 ? kernels.channel_scaled_keys : kernels.keys)[Index(code)];
}

// The kernel of the unquantized channels next to quantized ones.
inline const kernels::KeyKernel& UnquantizedKeyKernel(const kernels::AttentionKernels& kernels,
                                                      formats::ElementType code) noexcept {
  return code == formats::ElementType::kBf16 ? kernels.exact_keys : kernels.keys[Index(code)];
}

}  // namespace kvanta::attention
