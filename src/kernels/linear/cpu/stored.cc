// W as its views store it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/linear/cpu/packed_linear.h"

namespace kvanta::kernels {
namespace {

bool IsSameStorage(const WeightView& a, const WeightView& b) {
  return a.blocks == b.blocks && (a.blocks != BlockFormat::kNone || a.dtype == b.dtype);
}

std::unique_ptr<Linear> MakePart(const std::shared_ptr<LinearContext>& context, std::span<const WeightView> stacked,
                                 std::span<const float> bias, bool int16_activations) {
  if (stacked.front().blocks != BlockFormat::kNone) return MakeBlockLinear(context, stacked, bias, int16_activations);
  switch (stacked.front().dtype) {
    case DType::kBf16:
      return MakeBf16Linear(context, stacked, bias);
    case DType::kF16:
      return MakeF16Linear(context, stacked, bias);
    case DType::kF32:
      break;
  }
  return MakeF32Linear(context, stacked, bias);
}

// Matrices of different storages, stacked along `out`.
class StackedLinear final : public Linear {
 public:
  explicit StackedLinear(std::vector<std::unique_ptr<Linear>> parts) : parts_(std::move(parts)) {}

  int64_t In() const noexcept override { return parts_.front()->In(); }
  int64_t Out() const noexcept override {
    return Sum([](const Linear& part) { return part.Out(); });
  }
  int64_t WeightBytes() const noexcept override {
    return Sum([](const Linear& part) { return part.WeightBytes(); });
  }
  std::string_view Kind() const noexcept override { return parts_.front()->Kind(); }

  void Forward(const float* x, int64_t rows, float* y, int64_t y_stride, RowArgmax* argmaxes) const noexcept override {
    int64_t first = 0;
    for (const auto& part : parts_) {
      part->Forward(x, rows, y + first, y_stride, nullptr);
      first += part->Out();
    }
    for (int64_t row = 0; argmaxes != nullptr && row < rows; ++row) {
      argmaxes[row] = ArgmaxOf({y + row * y_stride, static_cast<size_t>(first)});
    }
  }

  void DequantizeRow(int64_t index, float* out) const noexcept override {
    size_t part = 0;
    for (; index >= parts_[part]->Out(); ++part) index -= parts_[part]->Out();
    parts_[part]->DequantizeRow(index, out);
  }

 private:
  template <class Get>
  int64_t Sum(Get get) const noexcept {
    int64_t sum = 0;
    for (const auto& part : parts_) sum += get(*part);
    return sum;
  }

  static RowArgmax ArgmaxOf(std::span<const float> row) noexcept {
    if (!std::ranges::all_of(row, [](float value) { return std::isfinite(value); })) return {};
    const auto best = std::ranges::max_element(row);
    return {.value = *best, .column = static_cast<int32_t>(best - row.begin()), .finite = true};
  }

  std::vector<std::unique_ptr<Linear>> parts_;
};

}  // namespace

std::unique_ptr<Linear> MakeStoredLinear(const std::shared_ptr<LinearContext>& context,
                                         std::span<const WeightView> stacked, std::span<const float> bias,
                                         bool int16_activations) {
  std::vector<std::unique_ptr<Linear>> parts;
  size_t bias_begin = 0;
  for (size_t begin = 0; begin < stacked.size();) {
    size_t end = begin, out = 0;
    for (; end < stacked.size() && IsSameStorage(stacked[begin], stacked[end]); ++end) {
      out += static_cast<size_t>(stacked[end].out);
    }
    const auto part_bias =
        bias.empty() ? bias : bias.subspan(bias_begin, end == stacked.size() ? bias.size() - bias_begin : out);
    parts.push_back(MakePart(context, stacked.subspan(begin, end - begin), part_bias, int16_activations));
    bias_begin += out;
    begin = end;
  }
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<StackedLinear>(std::move(parts));
}

}  // namespace kvanta::kernels
