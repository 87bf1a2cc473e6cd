// Kernels of causal convolutions, written once over the Vec16 of the including ISA unit.
#pragma once

#include "kernels/cpu/row_kernels.h"
#include "kernels/linear_attention/cpu/table.h"

namespace kvanta::kernels {
namespace {

template <bool kSilu>
void CausalConvRow(const float* const* inputs, const ConvWeights& weights, int taps, int64_t n, float* out) noexcept {
  const Vec16::F one = Vec16::Set1(1.0f);
  ForLanes(
      n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        Vec16::F sum = weights.bias == nullptr ? Vec16::Zero() : LoadVec16(weights.bias + i, lanes);
        for (int tap = 0; tap < taps; ++tap) {
          const Vec16::F weight = LoadVec16(weights.weights + tap * weights.stride + i, lanes);
          sum = Vec16::Fma(LoadVec16(inputs[tap] + i, lanes), weight, sum);
        }
        if constexpr (kSilu) sum = Vec16::Div(sum, Vec16::Add(one, Vec16::Exp(Vec16::Sub(Vec16::Zero(), sum))));
        StoreVec16(out + i, sum, lanes);
      });
}

constexpr CausalConvKernels kCausalConvKernels{.conv = CausalConvRow<false>, .conv_silu = CausalConvRow<true>};

}  // namespace
}  // namespace kvanta::kernels
