// AWQ, version "gemm": the weight transposed, eight outputs to a word in an order of their own.
#include <fmt/format.h>

#include "weights/quantized/integer_weight.h"

namespace kvanta::weights {

std::unique_ptr<QuantizedWeight> ReadAwq(ModuleTensors& tensors, const WeightSource& source) {
  constexpr int kPerWord = 8;
  IntegerParts parts{.packing = Packing::kAwq, .bits = 4};
  parts.group = source.config.group_size == 0 ? source.in : source.config.group_size;
  if (source.in % parts.group != 0 || source.out % kPerWord != 0) {
    tensors.Fail("qweight", fmt::format("has {} inputs and {} outputs; expected multiples of the group size ({}) and "
                                        "of {}",
                                        source.in, source.out, parts.group, kPerWord));
  }
  const int64_t groups = source.in / parts.group;
  parts.words = tensors.Get("qweight", "I32", {source.in, source.out / kPerWord}).data.data();
  const TensorView& zeros = tensors.Get("qzeros", "I32", {groups, source.out / kPerWord});
  tensors.Get("scales", "F16|BF16|F32", {groups, source.out});
  const std::vector<float> scales = tensors.Floats("scales", true);
  for (int64_t row = 0; row < source.out; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      parts.scales.push_back(scales[static_cast<size_t>(group * source.out + row)]);
      const uint32_t word = WordAt(zeros.data.data(), (group * source.out + row) / kPerWord);
      parts.zeros.push_back(static_cast<uint16_t>(word >> (4 * kAwqPosition[row % kPerWord]) & 15U));
    }
  }
  return MakeIntegerWeight(tensors, "qweight", source, std::move(parts));
}

}  // namespace kvanta::weights
