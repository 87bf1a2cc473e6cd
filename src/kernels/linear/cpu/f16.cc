// W in fp16: [k][16 columns]; x stays f32.
#include <fmt/format.h>

#include <atomic>
#include <cmath>

#include "kernels/linear/cpu/packed_linear.h"
#include "kvanta/error.h"

namespace kvanta::kernels {
namespace {

class F16Linear final : public PackedLinear {
 public:
  F16Linear(const std::shared_ptr<LinearContext>& context, std::span<const weights::WeightView> stacked,
            std::span<const float> bias)
      : PackedLinear(context, context->isa.linear.f16, stacked, bias) {
    std::atomic<float> too_large = 0;
    PackColumns(stacked, [&](int column, const float* row, uint8_t* panel) {
      auto* codes = reinterpret_cast<uint16_t*>(panel);
      for (int64_t k = 0; k < In(); ++k) {
        const uint16_t code = FloatToFp16(row[k]);
        codes[k * kPanelColumns + column] = code;
        if ((code & 0x7fffU) == 0x7c00U && !std::isinf(row[k])) too_large = row[k];
      }
    });
    if (too_large != 0) {
      throw InputError(
          fmt::format("a weight is {}, beyond float16's largest 65504; use bfloat16 or float32", too_large.load()));
    }
  }

  void DequantizeRow(int64_t index, float* out) const noexcept override {
    const auto* codes = reinterpret_cast<const uint16_t*>(Panel(index / kPanelColumns));
    for (int64_t k = 0; k < In(); ++k) out[k] = Fp16ToFloat(codes[k * kPanelColumns + index % kPanelColumns]);
  }

  std::string_view Kind() const noexcept override { return "f16"; }
};

}  // namespace

std::unique_ptr<Linear> MakeF16Linear(const std::shared_ptr<LinearContext>& context,
                                      std::span<const weights::WeightView> stacked, std::span<const float> bias) {
  return std::make_unique<F16Linear>(context, stacked, bias);
}

}  // namespace kvanta::kernels
