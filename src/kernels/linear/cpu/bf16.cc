// W in bf16: adjacent pairs of k, as vdpbf16ps multiplies them; x is rounded to bf16 on every ISA.
#include "kernels/linear/cpu/packed_linear.h"

namespace kvanta::kernels {
namespace {

// Index of (k, column) in a panel of codes.
constexpr int64_t CodeIndex(int64_t k, int64_t column) {
  return (k / 2 * kPanelColumns + column) * 2 + k % 2;
}

class Bf16Linear final : public PackedLinear {
 public:
  Bf16Linear(const std::shared_ptr<LinearContext>& context, std::span<const weights::WeightView> stacked,
             std::span<const float> bias)
      : PackedLinear(context, context->isa.linear.bf16, stacked, bias) {
    PackColumns(stacked, [this](int column, const float* row, uint8_t* panel) {
      auto* codes = reinterpret_cast<uint16_t*>(panel);
      for (int64_t k = 0; k < In(); ++k) codes[CodeIndex(k, column)] = FloatToBf16(row[k]);
    });
  }

  void DequantizeRow(int64_t index, float* out) const noexcept override {
    const auto* codes = reinterpret_cast<const uint16_t*>(Panel(index / kPanelColumns));
    for (int64_t k = 0; k < In(); ++k) out[k] = Bf16ToFloat(codes[CodeIndex(k, index % kPanelColumns)]);
  }

  std::string_view Kind() const noexcept override { return "bf16"; }
};

}  // namespace

std::unique_ptr<Linear> MakeBf16Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const weights::WeightView> stacked, std::span<const float> bias) {
  return std::make_unique<Bf16Linear>(context, stacked, bias);
}

}  // namespace kvanta::kernels
