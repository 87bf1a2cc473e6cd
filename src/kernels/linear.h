// A linear layer behind one small interface: y = x W^T + b. One file per way to store W.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "base/dtype.h"

namespace kvanta::kernels {

// A weight as the checkpoint has it: row-major [out][in].
struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t out = 0;
  int64_t in = 0;
  std::string_view module = {};  // its name in the checkpoint, for reports
};

class Linear {
 public:
  virtual ~Linear() = default;
  virtual int64_t In() const noexcept = 0;
  virtual int64_t Out() const noexcept = 0;
  // x: f32 [rows][in] dense; y: f32 [rows][out], row stride y_stride floats. A row's result does not depend on `rows`
  // nor on the number of threads.
  virtual void Forward(const float* x, int64_t rows, float* y, int64_t y_stride) const noexcept = 0;
  // Row `index` of W as f32 [in] (tied embeddings read it).
  virtual void ReadRow(int64_t index, float* out) const noexcept = 0;
  virtual int64_t WeightBytes() const noexcept = 0;    // bytes one forward of one row reads
  virtual std::string_view Kind() const noexcept = 0;  // "bf16", "f32", "f16"
};

}  // namespace kvanta::kernels
