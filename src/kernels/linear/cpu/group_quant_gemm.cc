// W as codes with scales apart, as quantized checkpoints have them. The layout of a panel is that of
// group_quant_kernel.h.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <ranges>

#include "formats/minifloat.h"
#include "kernels/linear/cpu/packed_linear.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

constexpr int kStepK = 128;

// Places in a step.
struct StepLayout {
  bool bytes;  // codes of 8 bits
  bool has_zeros;
  weights::GroupScale scales;
  int group;

  explicit StepLayout(const weights::KernelFormat& format)
      : bytes(CodeBits(format.codes) == 8),
        has_zeros(HasZeroPoints(format.codes)),
        scales(format.scales),
        group(format.group) {}

  int Groups() const { return kStepK / group; }
  int64_t ScaleBytes() const { return scales == weights::GroupScale::kF32 ? 4 : 1; }
  int64_t CodeByte(int k, int column) const { return int64_t{bytes ? k : k / 2} * kPanelColumns + column; }
  int CodeShift(int k) const { return bytes ? 0 : k % 2 * 4; }
  int64_t ScaleAt(int in_step, int column) const {
    const int64_t codes = int64_t{kStepK} * kPanelColumns / (bytes ? 1 : 2);
    return codes + (int64_t{in_step} * kPanelColumns + column) * ScaleBytes();
  }
  int64_t ZeroAt(int in_step, int column) const {
    return ScaleAt(Groups(), 0) + int64_t{in_step} * kPanelColumns + column;
  }
  int64_t TensorScaleAt(int column) const { return ScaleAt(Groups(), 0) + int64_t{column} * 4; }
  int64_t Bytes() const {
    return scales == weights::GroupScale::kE4M3 ? TensorScaleAt(kPanelColumns) : ZeroAt(has_zeros ? Groups() : 0, 0);
  }
};

class QuantizedLinear final : public PackedLinear {
 public:
  QuantizedLinear(const std::shared_ptr<LinearContext>& context, std::span<const weights::QuantizedView> stacked,
                  std::span<const weights::WeightView> shapes, std::span<const float> bias, int kernel_format)
      : PackedLinear(context, context->isa.linear.quantized->of[kernel_format], shapes, bias),
        format_(weights::kKernelFormats[kernel_format]),
        layout_(format_) {
    std::atomic<bool> infinite = false;
    PackIndices([&](int64_t index, int column, uint8_t* panel) {
      size_t view = 0;
      for (; index >= stacked[view].weight->Out(); ++view) index -= stacked[view].weight->Out();
      if (!PackRow(*stacked[view].weight, index, column, panel)) infinite = true;
    });
    if (infinite) throw InputError("a scale of quantized weights is beyond float32; use --dtype float32");
    SetOrder(stacked.front().weight->Order());
  }

  void DequantizeRow(int64_t index, float* out) const noexcept override {
    const uint8_t* panel = Panel(index / kPanelColumns);
    const auto column = static_cast<int>(index % kPanelColumns);
    for (int64_t k = 0; k < In(); ++k) {
      const uint8_t* step = panel + k / kStepK * StepBytes();
      const auto at = static_cast<int>(k % kStepK);
      const auto code = static_cast<uint8_t>(step[layout_.CodeByte(at, column)] >> layout_.CodeShift(at));
      const float value = Value(code, step, at / layout_.group, column) * Scale(step, at / layout_.group, column);
      out[Order().empty() ? k : Order()[static_cast<size_t>(k)]] = value;
    }
  }

  std::string_view Kind() const noexcept override { return format_.name; }

 private:
  // The kernel reads e4m3 codes times 2^-8.
  static constexpr float kE4m3Factor = 256;

  int64_t StepBytes() const noexcept { return layout_.Bytes(); }

  float Value(uint8_t code, const uint8_t* step, int group, int column) const noexcept {
    if (format_.codes == weights::CodeType::kE4M3) return formats::E4m3::Decode(code) / kE4m3Factor;
    if (format_.codes == weights::CodeType::kInt8) return static_cast<float>(static_cast<int8_t>(code));
    if (format_.codes == weights::CodeType::kInt4)
      return static_cast<float>((code & 15) - step[layout_.ZeroAt(group, column)]);
    return weights::ValuesOf(format_.codes).of[code & 15];
  }

  float Scale(const uint8_t* step, int group, int column) const noexcept {
    const uint8_t* p = step + layout_.ScaleAt(group, column);
    float scale;
    if (layout_.scales == weights::GroupScale::kE8M0) {
      return formats::E8m0::Decode(*p) * (format_.codes == weights::CodeType::kE4M3 ? kE4m3Factor : 1);
    }
    if (layout_.scales == weights::GroupScale::kF32) {
      std::memcpy(&scale, p, sizeof scale);
      return scale;
    }
    std::memcpy(&scale, step + layout_.TensorScaleAt(column), sizeof scale);
    return formats::E4m3::Decode(*p) * scale;
  }

  // False if a stored scale is not finite.
  bool PackRow(const weights::QuantizedWeight& weight, int64_t row, int column, uint8_t* panel) const {
    const auto groups = static_cast<size_t>(weight.Groups());
    std::vector<uint8_t> codes(static_cast<size_t>(In())), zeros(groups), scale_codes(groups);
    std::vector<float> scales(groups);
    weight.ReadCodes(row, codes.data());
    const float tensor_scale = weight.TensorScale();
    if (layout_.scales == weights::GroupScale::kF32) {
      weight.ReadScales(row, scales.data());
    } else {
      weight.ReadScaleCodes(row, scale_codes.data());
    }
    if (layout_.has_zeros) weight.ReadZeros(row, zeros.data());
    bool finite = std::isfinite(tensor_scale);
    for (int64_t first = 0; first < In(); first += kStepK, panel += StepBytes()) {
      const auto count = static_cast<int>(std::min<int64_t>(kStepK, In() - first));
      for (int k = 0; k < count; ++k) {
        const auto code = static_cast<uint8_t>(codes[static_cast<size_t>(first + k)] << layout_.CodeShift(k));
        panel[layout_.CodeByte(k, column)] |= code;
      }
      for (int group = 0; group < layout_.Groups() && group * layout_.group < count; ++group) {
        const auto from = static_cast<size_t>((first + group * layout_.group) / weight.Format().group);
        uint8_t* p = panel + layout_.ScaleAt(group, column);
        if (layout_.scales == weights::GroupScale::kF32) {
          const float scale = scales[from] * (format_.codes == weights::CodeType::kE4M3 ? kE4m3Factor : 1);
          finite = finite && std::isfinite(scale);
          std::memcpy(p, &scale, sizeof scale);
        } else {
          *p = scale_codes[from];
          // Loaded scales of E4M3 codes are multiplied.
          constexpr uint8_t kLargestMultiplied = 254 - 8;
          if (format_.codes == weights::CodeType::kE4M3) finite = finite && *p <= kLargestMultiplied;
        }
        if (layout_.has_zeros) panel[layout_.ZeroAt(group, column)] = zeros[from];
      }
      if (layout_.scales == weights::GroupScale::kE4M3) {
        std::memcpy(panel + layout_.TensorScaleAt(column), &tensor_scale, sizeof tensor_scale);
      }
    }
    return finite;
  }

  const weights::KernelFormat& format_;
  StepLayout layout_;
};

}  // namespace

std::unique_ptr<Linear> MakeQuantizedLinear(const std::shared_ptr<LinearContext>& context,
                                            std::span<const weights::QuantizedView> stacked,
                                            std::span<const float> bias) {
  if (stacked.empty()) throw InputError("a linear layer has no weight");
  const weights::QuantizedWeight& first = *stacked.front().weight;
  const int kernel_format = FindKernelFormat(first.Format(), first.In());
  if (kernel_format < 0) return nullptr;
  std::vector<weights::WeightView> shapes;
  for (const auto& [weight, module] : stacked) {
    if (FindKernelFormat(weight->Format(), weight->In()) != kernel_format ||
        !std::ranges::equal(weight->Order(), first.Order())) {
      return nullptr;
    }
    shapes.push_back({.data = weight, .out = weight->Out(), .in = weight->In(), .module = module});
  }
  return std::make_unique<QuantizedLinear>(context, stacked, shapes, bias, kernel_format);
}

}  // namespace kvanta::kernels
