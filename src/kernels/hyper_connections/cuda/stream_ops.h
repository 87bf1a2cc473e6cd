// Arguments of hyper-connections on a GPU (semantics: kernels/ops.h): plain data. All pointers are to device memory.
#pragma once

#include "kernels/hyper_connections/hyper_connections.h"

namespace kvanta::kernels::cuda {

struct StreamWeightsOp {
  HyperConnectionShape shape;
  StreamParameters parameters;
  int64_t rows = 0;
  float* weights = nullptr;
};

struct CollapseStreamsOp {
  HyperConnectionShape shape;
  const float *streams = nullptr, *weights = nullptr;
  int64_t rows = 0;
  float* out = nullptr;
};

struct ExpandStreamsOp {
  HyperConnectionShape shape;
  const float *weights = nullptr, *x = nullptr;
  int64_t rows = 0;
  float* streams = nullptr;
};

}  // namespace kvanta::kernels::cuda
