// Weights of quantized checkpoints as kernels read them: codes of 8 or 4 bits and, apart from them, a scale for each
// group of consecutive weights of a row. (Blocks that hold their scale themselves: weight_blocks.h.)
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "weights/four_bit_values.h"

namespace kvanta::weights {

// Value of a code.
enum class CodeType : uint8_t {
  kNone,  // rows can be dequantized, but have no codes that kernels read
  kE4M3,  // fp8 without infinities
  kInt8,  // two's complement
  kInt4,  // code - zero point: codes 0 to 15, zero points 0 to 16
  kNf4,   // bitsandbytes' 16 quantiles of the normal distribution
  kE2M1,  // fp4
};

// Storage of the scales of groups in memory.
enum class GroupScale : uint8_t {
  kF32,
  kE8M0,  // a power of two (MXFP4)
  kE4M3,  // fp8, times an f32 scale of the whole weight (NVFP4)
};

struct QuantizedFormat {
  CodeType codes = CodeType::kNone;
  GroupScale scales = GroupScale::kF32;
  int64_t group = 0;  // consecutive weights that share a scale; `in` where a whole row does
};

constexpr int CodeBits(CodeType type) noexcept {
  return type == CodeType::kE4M3 || type == CodeType::kInt8 ? 8 : 4;
}
constexpr bool HasZeroPoints(CodeType type) noexcept {
  return type == CodeType::kInt4;
}

// A format that kernels read.
struct KernelFormat {
  std::string_view name;
  CodeType codes;
  GroupScale scales;
  int group;  // weights that share a scale: a divisor of 128
};
// The list of them: names, packed layouts, the kernels of every CPU unit and typed tests derive from it. A new one is
// its line here and the reader of its tensors (quantized/). Of equal codes and scales, the largest group comes first.
inline constexpr KernelFormat kKernelFormats[] = {
    {"E4M3", CodeType::kE4M3, GroupScale::kF32, 128},  //
    {"INT8", CodeType::kInt8, GroupScale::kF32, 128},  {"INT8", CodeType::kInt8, GroupScale::kF32, 32},
    {"INT4", CodeType::kInt4, GroupScale::kF32, 128},  {"INT4", CodeType::kInt4, GroupScale::kF32, 32},
    {"NF4", CodeType::kNf4, GroupScale::kF32, 64},     {"MXFP4", CodeType::kE2M1, GroupScale::kE8M0, 32},
    {"NVFP4", CodeType::kE2M1, GroupScale::kE4M3, 16}, {"MXFP8", CodeType::kE4M3, GroupScale::kE8M0, 32},
};
inline constexpr int kKernelFormatCount = sizeof kKernelFormats / sizeof kKernelFormats[0];

// Name of the kernel format with these codes and scales, or "none".
std::string_view Name(const QuantizedFormat& format) noexcept;

// Index in kKernelFormats of a packed weight with rows of `in`: the format of the same codes and scales with the
// largest group that divides the weight's. -1: no kernel reads it.
int FindKernelFormat(const QuantizedFormat& format, int64_t in) noexcept;

// Bytes of 128 k and 16 columns of a packed weight, or 0.
int64_t QuantizedStepBytes(const QuantizedFormat& format, int64_t in) noexcept;

// Values of the 16 codes of kNf4 and kE2M1.
const FourBitValues& ValuesOf(CodeType type) noexcept;

// Rows of a weight [out][in]. Weight i of a row, in the order of codes, is value(code i) * scale(group i / group).
class QuantizedWeight {
 public:
  QuantizedWeight(int64_t out, int64_t in, QuantizedFormat format) : out_(out), in_(in), format_(format) {}
  virtual ~QuantizedWeight() = default;
  QuantizedWeight(const QuantizedWeight&) = delete;
  QuantizedWeight& operator=(const QuantizedWeight&) = delete;

  int64_t Out() const noexcept { return out_; }
  int64_t In() const noexcept { return in_; }
  const QuantizedFormat& Format() const noexcept { return format_; }
  int64_t Groups() const noexcept { return (in_ + format_.group - 1) / format_.group; }
  // Columns of W in the order of codes: code i is that of column Order()[i]. Empty: code i is that of column i.
  std::span<const int32_t> Order() const noexcept { return order_; }

  // codes: [in], a byte each.
  virtual void ReadCodes(int64_t /*row*/, uint8_t* /*codes*/) const {}
  // scales: f32 [Groups()], as weights are dequantized with.
  virtual void ReadScales(int64_t /*row*/, float* /*scales*/) const {}
  // zeros: [Groups()], only for kInt4.
  virtual void ReadZeros(int64_t /*row*/, uint8_t* /*zeros*/) const {}
  // codes: [Groups()], the bytes of scales in kE8M0 or kE4M3.
  virtual void ReadScaleCodes(int64_t /*row*/, uint8_t* /*codes*/) const {}
  // With kE4M3 scales: the factor of all of them.
  virtual float TensorScale() const { return 1; }
  // Row as f32 [in], in W's order of columns. This is the definition of the weights.
  virtual void DequantizeRow(int64_t row, float* out) const;

 protected:
  int64_t out_;
  int64_t in_;
  QuantizedFormat format_;
  std::vector<int32_t> order_;
};

// One weight of a stack, by the name of its module.
struct QuantizedView {
  const QuantizedWeight* weight = nullptr;
  std::string_view module = {};  // for reports
};

}  // namespace kvanta::weights
