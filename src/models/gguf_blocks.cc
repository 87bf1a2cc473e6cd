#include "models/gguf_blocks.h"

#include <fmt/format.h>

#include <array>

#include "base/quote.h"
#include "kernels/linear/weight_blocks.h"
#include "kvanta/error.h"

namespace kvanta::models {
namespace {

using kernels::BlockFormat;
using kernels::kBlockWeights;

// A tensor is U8 [out][in / 32][bytes of a block]; the last size determines the format.
BlockFormat FormatOf(const TensorView& tensor) {
  if (tensor.dtype != "U8" || tensor.shape.size() != 3) return BlockFormat::kNone;
  for (const BlockFormat format : {BlockFormat::kQ8_0, BlockFormat::kQ4_0, BlockFormat::kQ4_1}) {
    if (tensor.shape[2] == BlockBytes(format)) return format;
  }
  return BlockFormat::kNone;
}

bool IsSameRow(const kernels::WeightView& blocks, const kernels::WeightView& elements, int64_t row) {
  const int64_t bytes = BlockBytes(blocks.blocks);
  const int64_t count = blocks.in / kBlockWeights;
  const uint8_t* data = static_cast<const uint8_t*>(blocks.data) + row * count * bytes;
  for (int64_t block = 0; block < count; ++block) {
    float values[kBlockWeights];
    BlockValues(ReadBlock(data + block * bytes, blocks.blocks), values);
    for (int i = 0; i < kBlockWeights; ++i) {
      const float element = ElementValue(elements, row * blocks.in + block * kBlockWeights + i);
      if (Bf16ToFloat(FloatToBf16(values[i])) != Bf16ToFloat(FloatToBf16(element))) return false;  // -0 equals 0
    }
  }
  return true;
}

}  // namespace

float ElementValue(const kernels::WeightView& weight, int64_t i) noexcept {
  switch (weight.dtype) {
    case DType::kF32:
      return static_cast<const float*>(weight.data)[i];
    case DType::kBf16:
      return Bf16ToFloat(static_cast<const uint16_t*>(weight.data)[i]);
    case DType::kF16:
      break;
  }
  return Fp16ToFloat(static_cast<const uint16_t*>(weight.data)[i]);
}

GgufBlocks::GgufBlocks(const std::string& folder)
    : path_(fmt::format("{}/{}", folder, kName)), file_(Checkpoint::OpenFile(folder, kName)) {}

std::optional<kernels::WeightView> GgufBlocks::Find(const std::string& tensor, const kernels::WeightView& elements,
                                                    kernels::WeightType store) const {
  const TensorView* found = file_.Find(tensor);
  if (found == nullptr) return std::nullopt;
  const BlockFormat format = FormatOf(*found);
  if (format == BlockFormat::kNone || elements.in % kBlockWeights != 0 || found->shape[0] != elements.out ||
      found->shape[1] != elements.in / kBlockWeights) {
    throw InputError(fmt::format("{}: tensor {} is {} {}; expected U8 [{}, {}, 34, 18 or 20], blocks of {} weights",
                                 path_, Quote(tensor), found->dtype, ShapeText(found->shape), elements.out,
                                 elements.in / kBlockWeights, kBlockWeights));
  }
  const bool is_kept = (format == BlockFormat::kQ8_0) == (store == kernels::WeightType::kInt8);
  if (!is_kept) return std::nullopt;
  kernels::WeightView view = elements;
  view.data = found->data.data();
  view.blocks = format;
  for (const int64_t row : std::array<int64_t, 2>{0, elements.out - 1}) {
    if (!IsSameRow(view, elements, row)) {
      throw InputError(fmt::format(
          "{}: row {} of tensor {} is not that of the model's weights, which were changed after the conversion: "
          "convert the GGUF file again, or remove this file",
          path_, row, Quote(tensor)));
    }
  }
  return view;
}

}  // namespace kvanta::models
