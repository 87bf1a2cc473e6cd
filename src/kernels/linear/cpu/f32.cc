// W in f32: [k][16 columns].
#include "kernels/linear/cpu/packed_linear.h"

namespace kvanta::kernels {
namespace {

class F32Linear final : public PackedLinear {
 public:
  F32Linear(const std::shared_ptr<LinearContext>& context, std::span<const weights::WeightView> stacked,
            std::span<const float> bias)
      : PackedLinear(context, context->isa.linear.f32, stacked, bias) {
    PackColumns(stacked, [this](int column, const float* row, uint8_t* panel) {
      auto* values = reinterpret_cast<float*>(panel);
      for (int64_t k = 0; k < In(); ++k) values[k * kPanelColumns + column] = row[k];
    });
  }

  void DequantizeRow(int64_t index, float* out) const noexcept override {
    const auto* values = reinterpret_cast<const float*>(Panel(index / kPanelColumns));
    for (int64_t k = 0; k < In(); ++k) out[k] = values[k * kPanelColumns + index % kPanelColumns];
  }

  std::string_view Kind() const noexcept override { return "f32"; }
};

}  // namespace

std::unique_ptr<Linear> MakeF32Linear(const std::shared_ptr<LinearContext>& context,
                                      std::span<const weights::WeightView> stacked, std::span<const float> bias) {
  return std::make_unique<F32Linear>(context, stacked, bias);
}

}  // namespace kvanta::kernels
