#include "weights/weight_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kvanta/error.h"

namespace kvanta::weights {

void CheckWeights(std::span<const WeightView> stacked, std::span<const float> bias) {
  if (stacked.empty()) throw InputError("a linear layer has no weight");
  const int64_t in = stacked.front().in;
  int64_t out = 0;
  for (const WeightView& view : stacked) {
    if (view.data == nullptr || view.out < 1 || view.in < 1 || view.in != in) {
      throw InputError(fmt::format("a linear layer's weight has shape [{}][{}]; expected [1 or more][{}]", view.out,
                                   view.in, std::max<int64_t>(in, 1)));
    }
    if (view.in % BlockWeights(view.blocks) != 0) {
      throw InputError(fmt::format("a linear layer's weight has {} blocks of {} in rows of {}", Name(view.blocks),
                                   BlockWeights(view.blocks), view.in));
    }
    out += view.out;
  }
  if (!bias.empty() && std::ssize(bias) != out) {
    throw InputError(fmt::format("a linear layer's bias has {} values; expected {}", bias.size(), out));
  }
}

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

}  // namespace kvanta::weights
