// W as its views store it.
#include <algorithm>
#include <vector>

#include "kernels/linear/cpu/packed_linear.h"
#include "kernels/linear/stacked_linear.h"

namespace kvanta::kernels {
namespace {

bool IsSameStorage(const weights::WeightView& a, const weights::WeightView& b) {
  return a.blocks == b.blocks && (a.blocks != weights::BlockFormat::kNone || a.dtype == b.dtype);
}

std::unique_ptr<Linear> MakePart(const std::shared_ptr<LinearContext>& context,
                                 std::span<const weights::WeightView> stacked, std::span<const float> bias,
                                 bool int16_activations) {
  if (stacked.front().blocks != weights::BlockFormat::kNone)
    return MakeBlockLinear(context, stacked, bias, int16_activations);
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

}  // namespace

std::unique_ptr<Linear> MakeStoredLinear(const std::shared_ptr<LinearContext>& context,
                                         std::span<const weights::WeightView> stacked, std::span<const float> bias,
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
  return MakeStackedLinear(std::move(parts));
}

}  // namespace kvanta::kernels
