// Integers of 8 bits stored as such: w = (code - zero point) * scale.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "weights/quantized/quantized_weights.h"

namespace kvanta::weights {
namespace {

// Scales and zero points: of the tensor, of rows, or of groups of a row.
struct Int8Parts {
  std::vector<float> scales;
  std::vector<int8_t> zeros;  // as many, or none
  bool of_tensor = false;     // one scale
  int64_t group = 0;
};

class Int8Weight final : public QuantizedWeight {
 public:
  // Codes less their zero points take 9 bits: no kernel reads them.
  Int8Weight(const WeightSource& source, const uint8_t* codes, Int8Parts parts)
      : QuantizedWeight(source.out, source.in,
                        {parts.zeros.empty() ? CodeType::kInt8 : CodeType::kNone, GroupScale::kF32, parts.group}),
        codes_(codes),
        parts_(std::move(parts)) {}

  void ReadCodes(int64_t row, uint8_t* codes) const override { std::copy_n(codes_ + row * In(), In(), codes); }
  void ReadScales(int64_t row, float* scales) const override {
    std::copy_n(parts_.scales.begin() + FirstScale(row), Groups(), scales);
  }
  void DequantizeRow(int64_t row, float* out) const override {
    for (int64_t k = 0; k < In(); ++k) {
      const auto at = static_cast<size_t>(FirstScale(row) + k / parts_.group);
      const auto code = static_cast<int8_t>(codes_[row * In() + k]);
      out[k] = static_cast<float>(int{code} - (parts_.zeros.empty() ? 0 : parts_.zeros[at])) * parts_.scales[at];
    }
  }

 private:
  int64_t FirstScale(int64_t row) const { return parts_.of_tensor ? 0 : row * Groups(); }

  const uint8_t* codes_;  // [out][in]
  Int8Parts parts_;
};

int64_t FindGroup(ModuleTensors& tensors, std::string_view part, const WeightSource& source, bool& of_tensor) {
  const TensorView& tensor = tensors.Get(part);
  const auto& shape = tensor.shape;
  of_tensor = shape.empty() || std::ranges::all_of(shape, [](int64_t size) { return size == 1; });
  if (of_tensor) return source.in;
  const bool rows = !shape.empty() && shape.size() <= 2 && shape[0] == source.out;
  const int64_t groups = shape.size() == 2 ? shape[1] : 1;
  if (rows && groups >= 1 && source.in % groups == 0) return source.in / groups;
  tensors.Fail(part, fmt::format("has shape {}; expected [], [1], [{}], [{}, 1] or [{}, groups that divide {}]",
                                 ShapeText(shape), source.out, source.out, source.out, source.in));
}

}  // namespace

std::unique_ptr<QuantizedWeight> ReadInt8(ModuleTensors& tensors, const WeightSource& source) {
  const TensorView& weight = tensors.Get("weight", "I8", {source.out, source.in});
  Int8Parts parts;
  if (source.config.method == QuantMethod::kBitsAndBytes) {
    tensors.Get("SCB", "F32", {source.out});
    parts.scales = tensors.Floats("SCB", true);  // a row's maximum, 127 steps
    for (float& scale : parts.scales) scale *= 1.0F / 127;
    parts.group = source.in;
    return std::make_unique<Int8Weight>(source, weight.data.data(), std::move(parts));
  }
  constexpr const char* kScaleName = "weight_scale";
  constexpr const char* kZero = "weight_zero_point";
  parts.group = FindGroup(tensors, kScaleName, source, parts.of_tensor);
  parts.scales = tensors.Floats(kScaleName);
  if (const TensorView* zeros = tensors.Find(kZero)) {
    if (zeros->dtype != "I8" || zeros->data.size() != parts.scales.size()) {
      tensors.Fail(kZero, fmt::format("is {} {}; expected I8 of as many values as {} ({})", zeros->dtype,
                                      ShapeText(zeros->shape), kScaleName, parts.scales.size()));
    }
    for (const uint8_t zero : zeros->data) parts.zeros.push_back(static_cast<int8_t>(zero));
    if (std::ranges::all_of(parts.zeros, [](int8_t zero) { return zero == 0; })) parts.zeros.clear();
  }
  return std::make_unique<Int8Weight>(source, weight.data.data(), std::move(parts));
}

}  // namespace kvanta::weights
