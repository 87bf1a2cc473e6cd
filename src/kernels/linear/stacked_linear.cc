#include "kernels/linear/stacked_linear.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

namespace kvanta::kernels {
namespace {

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
  int64_t BlockRows() const noexcept override {
    const auto fewer = [](const auto& a, const auto& b) { return a->BlockRows() < b->BlockRows(); };
    return (*std::ranges::min_element(parts_, fewer))->BlockRows();
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

std::unique_ptr<Linear> MakeStackedLinear(std::vector<std::unique_ptr<Linear>> parts) {
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<StackedLinear>(std::move(parts));
}

}  // namespace kvanta::kernels
