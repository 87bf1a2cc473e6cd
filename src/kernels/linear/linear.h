// A linear layer behind one small interface: y = x W^T + b. One file per way to store W.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "base/dtype.h"
#include "kernels/linear/weight_blocks.h"

namespace kvanta::kernels {

// How a layer keeps its W. Elements: W in that type. Blocks of 32 along a row with fp16 scales (weight_blocks.h): 8
// bits, or 4 bits with minimums where a weight has them; x then is rounded to steps of the largest of each 32.
enum class WeightType : uint8_t { kF32, kBf16, kF16, kInt8, kInt4 };

constexpr WeightType WeightTypeOf(DType type) noexcept {
  return type == DType::kF32 ? WeightType::kF32 : type == DType::kBf16 ? WeightType::kBf16 : WeightType::kF16;
}

// How a layer is kept, and what it multiplies with.
struct LinearKind {
  WeightType weights;
  // Of blocks: x is rounded to 32,512 steps of the largest of each 32 instead of 127, two dots instead of one on most
  // instruction sets.
  bool int16_activations = false;

  constexpr LinearKind(WeightType type, bool wide = false)
      : weights(type), int16_activations(wide) {}  // NOLINT: meant to convert
};

// A weight as the checkpoint has it: row-major [out][in], elements or blocks (then `in` is a multiple of 32).
struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::kF32;  // of elements
  int64_t out = 0;
  int64_t in = 0;
  BlockFormat blocks = BlockFormat::kNone;
  std::string_view module = {};  // its name in the checkpoint, for reports
};

// The largest value of a row of a product, found while the row is in the caches.
struct RowArgmax {
  float value = 0;
  int32_t column = 0;   // the first of those that have it
  bool finite = false;  // every value of the row; else the other two mean nothing
};

class Linear {
 public:
  virtual ~Linear() = default;
  virtual int64_t In() const noexcept = 0;
  virtual int64_t Out() const noexcept = 0;
  // x: f32 [rows][in] dense; y: f32 [rows][out], row stride y_stride floats; argmaxes of y's rows [rows] unless null. A
  // row's result does not depend on `rows` nor on the number of threads.
  virtual void Forward(const float* x, int64_t rows, float* y, int64_t y_stride,
                       RowArgmax* argmaxes) const noexcept = 0;
  void Forward(const float* x, int64_t rows, float* y, int64_t y_stride) const noexcept {
    Forward(x, rows, y, y_stride, nullptr);
  }
  // Row `index` of W as f32 [in] (tied embeddings read it).
  virtual void DequantizeRow(int64_t index, float* out) const noexcept = 0;
  virtual int64_t WeightBytes() const noexcept = 0;    // bytes one forward of one row reads
  virtual std::string_view Kind() const noexcept = 0;  // "bf16", "f32", "f16", "int8", "int4"
};

// Rows of several layers: those of layer m begin at first + m * member, f32, their stride in floats.
struct MemberRows {
  const float* first = nullptr;
  int64_t stride = 0;
  int64_t member = 0;
};
struct MemberOutputs {
  float* first = nullptr;
  int64_t stride = 0;
  int64_t member = 0;
};

// Layers of one shape and kind, without a bias, as many as there are for `rows` rows each. A row has the bits that its
// layer alone gives it.
class LinearGroup {
 public:
  virtual ~LinearGroup() = default;
  virtual void Forward(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept = 0;
};

}  // namespace kvanta::kernels
