// Arguments of the compressor of tokens on a GPU: plain data. All pointers are to device memory.
#pragma once

#include "kernels/compression/compressor.h"
#include "kernels/linear_attention/cuda/recurrent_ops.h"

namespace kvanta::kernels::cuda {

// CompressorOp's entries and keys.
struct MakeEntriesOp {
  DeviceStates states;
  CompressorShape shape;
  const float* inputs = nullptr;
  const int64_t* positions = nullptr;
  int64_t rows = 0;
  const float *entry_bias = nullptr, *key_bias = nullptr;
  float *entries = nullptr, *keys = nullptr;
};

// CompressorOp's states. After MakeEntriesOp, which reads those that this one may overwrite.
struct KeepInputsOp {
  DeviceStates states;
  CompressorShape shape;
  const float* inputs = nullptr;
  const int64_t* positions = nullptr;
};

}  // namespace kvanta::kernels::cuda
