// Quantized weights in the reader of weights: kept as they are, or expanded.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "base/quote.h"
#include "kernels/linear/stacked_linear.h"
#include "kvanta/error.h"
#include "models/weights.h"
#include "weights/quantized/quantized_weights.h"

namespace kvanta::models {
namespace {

using kernels::WeightType;

// Largest magnitude that stays finite when stored so.
float LargestStored(WeightType store) {
  constexpr float kLargestF16 = 65519.0F;  // rounds to 65504
  constexpr float kLargestBf16 = 0x1.fep127F;
  if (store == WeightType::kF16) return kLargestF16;
  return store == WeightType::kF32 ? std::numeric_limits<float>::max() : kLargestBf16;
}

// Rows [first, first + count) of another weight, in the order of its view.
class PermutedRows final : public weights::QuantizedWeight {
 public:
  PermutedRows(std::unique_ptr<weights::QuantizedWeight> weight, const weights::WeightView& view, int64_t first,
               int64_t count)
      : QuantizedWeight(count, weight->In(), weight->Format()), weight_(std::move(weight)), view_(view), first_(first) {
    order_.assign(weight_->Order().begin(), weight_->Order().end());
  }

  void ReadCodes(int64_t row, uint8_t* codes) const override { weight_->ReadCodes(Stored(row), codes); }
  void ReadScales(int64_t row, float* scales) const override { weight_->ReadScales(Stored(row), scales); }
  void ReadZeros(int64_t row, uint8_t* zeros) const override { weight_->ReadZeros(Stored(row), zeros); }
  void ReadScaleCodes(int64_t row, uint8_t* codes) const override { weight_->ReadScaleCodes(Stored(row), codes); }
  float TensorScale() const override { return weight_->TensorScale(); }
  void DequantizeRow(int64_t row, float* out) const override { weight_->DequantizeRow(Stored(row), out); }

 private:
  int64_t Stored(int64_t row) const noexcept { return view_.StoredRow(first_ + row); }

  std::unique_ptr<weights::QuantizedWeight> weight_;
  weights::WeightView view_;
  int64_t first_;
};

}  // namespace

std::unique_ptr<weights::QuantizedWeight> WeightReader::FindQuantized(const StackedWeight& weight, int64_t in,
                                                                      bool has_bias) {
  if (checkpoint_.IsGguf()) return nullptr;
  weights::FoundWeight found =
      weights::FindQuantizedWeight(checkpoint_, quantization_, weight.module, weight.TensorOut(), in, ops_.threads());
  if (!found.weight) return nullptr;
  for (const std::string& name : found.tensors) {
    read_.insert(name);
    mapped_.push_back(checkpoint_.Find(name));
  }
  // Quantizers write biases of zeros for layers without one; others stay unread, which is an error.
  const std::string bias = weight.module + ".bias";
  const weights::TensorView* tensor = has_bias ? nullptr : checkpoint_.Find(bias);
  if (tensor != nullptr && std::ranges::all_of(tensor->data, [](uint8_t byte) { return byte == 0; })) {
    read_.insert(bias);
  }
  const Rows rows = RowsOf(weight);
  if (weight.interleaved_heads == 0 && rows.count == weight.TensorOut()) return std::move(found.weight);
  return std::make_unique<PermutedRows>(std::move(found.weight),
                                        weights::WeightView{.out = weight.TensorOut(),
                                                            .in = in,
                                                            .interleaved_heads = weight.interleaved_heads,
                                                            .interleaved_first = weight.interleaved_first},
                                        weight.tensor_first + rows.first, rows.count);
}

std::unique_ptr<kernels::Linear> WeightReader::QuantizedLinear(
    std::span<const StackedWeight> stack, std::span<const std::unique_ptr<weights::QuantizedWeight>> quantized,
    int64_t in, std::span<const float> bias, kernels::LinearKind kind) {
  std::vector<std::span<const float>> biases;
  size_t first = 0;
  for (const StackedWeight& weight : stack) {
    const auto count = static_cast<size_t>(RowsOf(weight).count);
    biases.push_back(bias.empty() ? bias : bias.subspan(first, count));
    first += count;
  }
  const auto keep = [&](std::span<const weights::QuantizedView> views, std::span<const float> of_views) {
    std::unique_ptr<kernels::Linear> linear = ops_.MakeQuantizedLinear(views, of_views);
    if (linear) bytes_ += linear->WeightBytes() + static_cast<int64_t>(of_views.size_bytes());
    return linear;
  };
  std::vector<std::unique_ptr<kernels::Linear>> kept(stack.size());  // null: expanded, or not quantized
  if (KeepsQuantized(kind)) {
    std::vector<weights::QuantizedView> views;
    for (size_t i = 0; i < stack.size() && quantized[i]; ++i) views.push_back({quantized[i].get(), stack[i].module});
    if (views.size() == stack.size()) {
      if (auto linear = keep(views, bias)) return linear;
    }
    for (size_t i = 0; i < stack.size(); ++i) {
      const weights::QuantizedView view{quantized[i].get(), stack[i].module};
      if (quantized[i]) kept[i] = keep({&view, 1}, biases[i]);
    }
  }
  std::vector<std::vector<float>> expanded(stack.size());
  const auto read = [&](size_t i) {
    const StackedWeight& weight = stack[i];
    if (!quantized[i]) {
      const weights::WeightView view = ReadWeight(weight, in);
      CheckWeight(view, kind.weights);
      return view;
    }
    expanded[i] = Expand(*quantized[i], weight.module, kind.weights);
    return weights::WeightView{.data = expanded[i].data(),
                               .dtype = DType::kF32,
                               .out = quantized[i]->Out(),
                               .in = in,
                               .module = weight.module};
  };
  if (std::ranges::all_of(kept, [](const auto& linear) { return linear == nullptr; })) {
    std::vector<weights::WeightView> views;
    for (size_t i = 0; i < stack.size(); ++i) views.push_back(read(i));
    return Pack(views, bias, kind);
  }
  // Weights whose storages differ are layers side by side.
  for (size_t i = 0; i < stack.size(); ++i) {
    if (kept[i]) continue;
    const weights::WeightView view = read(i);
    kept[i] = Pack(std::span(&view, 1), biases[i], kind);
  }
  return kernels::MakeStackedLinear(std::move(kept));
}

std::vector<float> WeightReader::Expand(const weights::QuantizedWeight& weight, const std::string& module,
                                        WeightType store) const {
  std::vector<float> values(static_cast<size_t>(weight.Out() * weight.In()));
  const float limit = LargestStored(store);
  std::atomic<int64_t> bad_row = -1;
  auto read = [&](int64_t row, int) {
    float* out = values.data() + row * weight.In();
    weight.DequantizeRow(row, out);
    if (!std::all_of(out, out + weight.In(), [&](float value) { return std::abs(value) <= limit; })) bad_row = row;
  };
  ops_.threads().ForEach(weight.Out(), read);
  if (bad_row >= 0) {
    throw InputError(fmt::format("{}: row {} of the quantized weight of {} has a value beyond {}", checkpoint_.Name(),
                                 bad_row.load(), Quote(module), limit));
  }
  return values;
}

}  // namespace kvanta::models
