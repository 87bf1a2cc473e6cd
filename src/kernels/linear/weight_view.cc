#include "kernels/linear/weight_view.h"

#include <cstring>

namespace kvanta::kernels {

void ReadWeightRow(const WeightView& view, int64_t row, float* out) noexcept {
  const uint8_t* bytes = view.RowData(row);
  if (view.blocks != BlockFormat::kNone) return DequantizeBlocks(bytes, view.blocks, view.in, out);
  if (view.dtype == DType::kF32) {
    std::memcpy(out, bytes, static_cast<size_t>(view.in) * sizeof(float));
    return;
  }
  const bool bf16 = view.dtype == DType::kBf16;
  for (int64_t k = 0; k < view.in; ++k) {
    uint16_t code;
    std::memcpy(&code, bytes + 2 * k, sizeof code);
    out[k] = bf16 ? Bf16ToFloat(code) : Fp16ToFloat(code);
  }
}

}  // namespace kvanta::kernels
