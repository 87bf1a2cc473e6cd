// W in elements: f32 and f16 as [k][16 columns], x in f32; bf16 as adjacent pairs of k, as vdpbf16ps multiplies them, x
// rounded to bf16 on every ISA.
#include <fmt/format.h>

#include <atomic>
#include <cmath>

#include "kernels/linear/cpu/packed_linear.h"
#include "kvanta/error.h"

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

std::unique_ptr<Linear> MakeF32Linear(const std::shared_ptr<LinearContext>& context,
                                      std::span<const weights::WeightView> stacked, std::span<const float> bias) {
  return std::make_unique<F32Linear>(context, stacked, bias);
}

std::unique_ptr<Linear> MakeBf16Linear(const std::shared_ptr<LinearContext>& context,
                                       std::span<const weights::WeightView> stacked, std::span<const float> bias) {
  return std::make_unique<Bf16Linear>(context, stacked, bias);
}

std::unique_ptr<Linear> MakeF16Linear(const std::shared_ptr<LinearContext>& context,
                                      std::span<const weights::WeightView> stacked, std::span<const float> bias) {
  return std::make_unique<F16Linear>(context, stacked, bias);
}

}  // namespace kvanta::kernels
