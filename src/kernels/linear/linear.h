// Interface of a linear layer, y = x W^T + b. Each storage of W has a file of its own (cpu/, cuda/).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>

#include "base/dtype.h"
#include "weights/weight_view.h"

namespace kvanta::kernels {

// Storage of a layer's W: elements of that type; blocks of 32 along a row with fp16 scales (weight_blocks.h), of 8
// bits, or of 4 bits with offsets where a weight has them; or each weight as its view stores it, elements or blocks.
// With blocks, x is quantized per 32 values.
enum class WeightType : uint8_t { kF32, kBf16, kF16, kInt8, kInt4, kStored };

constexpr WeightType WeightTypeOf(DType type) noexcept {
  return type == DType::kF32 ? WeightType::kF32 : type == DType::kBf16 ? WeightType::kBf16 : WeightType::kF16;
}

// True if a layer of this type keeps blocks of the format as they are, instead of converting their weights.
constexpr bool KeepsBlocks(WeightType type, weights::BlockFormat format) noexcept {
  if (type == WeightType::kStored) return format != weights::BlockFormat::kNone;
  if (type == WeightType::kInt8) return format == weights::BlockFormat::kQ8_0;
  return type == WeightType::kInt4 && (format == weights::BlockFormat::kQ4_0 || format == weights::BlockFormat::kQ4_1);
}

// Storage of W, and precision of x.
struct LinearKind {
  WeightType weights;
  // With blocks: x is quantized to 32,512 steps of the maximum of each 32 instead of 127, at the cost of two dots
  // instead of one on most instruction sets.
  bool int16_activations = false;

  // NOLINTNEXTLINE(google-explicit-constructor): meant to convert
  constexpr LinearKind(WeightType type, bool int16 = false) : weights(type), int16_activations(int16) {}
};

// Maximum of a row of a product, computed while the row is in the caches.
struct RowArgmax {
  float value = 0;
  int32_t column = 0;   // the first column with that value
  bool finite = false;  // whether all values of the row are finite; if not, the other two are undefined
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
  // Rows for which Forward reads W once: activations between two layers are best computed for so many at a time, while
  // they are in the caches.
  virtual int64_t BlockRows() const noexcept { return std::numeric_limits<int32_t>::max(); }
  // Row `index` of W as f32 [in] (tied embeddings read it).
  virtual void DequantizeRow(int64_t index, float* out) const noexcept = 0;
  virtual int64_t WeightBytes() const noexcept = 0;    // bytes that the forward of one row reads
  virtual std::string_view Kind() const noexcept = 0;  // "bf16", "f32", "f16", "int8", "int4", "Q4_K", ...
};

// Rows of several layers: those of layer m begin at first + m * member. f32; strides in floats.
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

// Layers of one shape and kind, without bias, applied to `rows` rows each. A row has the same bits as its layer alone
// computes.
class LinearGroup {
 public:
  virtual ~LinearGroup() = default;
  virtual void Forward(const MemberRows& x, int64_t rows, const MemberOutputs& y) const noexcept = 0;
};

}  // namespace kvanta::kernels
