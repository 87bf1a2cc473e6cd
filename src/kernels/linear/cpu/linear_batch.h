// Products of several layers in one parallel region: a layer of few rows alone would not occupy all threads for long.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/linear/cpu/packed_linear.h"

namespace kvanta::kernels {

struct LinearProduct {
  const PackedLinear* layer = nullptr;
  const float* x = nullptr;  // f32 [rows][in], dense
  int64_t rows = 0;
  float* y = nullptr;  // f32 [rows][out], dense
};

// Computes all products, with the bits of each layer's Forward. The layers are of one context.
void ForwardBatch(std::span<const LinearProduct> products) noexcept;

}  // namespace kvanta::kernels
