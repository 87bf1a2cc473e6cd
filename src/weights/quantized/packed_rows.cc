// compressed-tensors, format "pack-quantized": codes of 1 to 8 bits along rows, stored plus 2^(bits - 1).
#include <fmt/format.h>

#include <algorithm>

#include "weights/quantized/integer_weight.h"

namespace kvanta::weights {
namespace {

constexpr const char* kPackedPart = "weight_packed";
constexpr const char* kScalePart = "weight_scale";
constexpr const char* kZeroPart = "weight_zero_point";
constexpr const char* kIndexPart = "weight_g_idx";

// Bits of a code by the words of a row; the declared ones where several would give as many words.
int BitsOfRows(ModuleTensors& tensors, const WeightSource& source) {
  const TensorView& packed = tensors.Get(kPackedPart);
  int found = 0;
  for (int bits = 1; bits <= 8 && packed.shape.size() == 2; ++bits) {
    if (packed.shape[1] == WordsOf(source.in, bits) && (found == 0 || bits == source.config.bits)) found = bits;
  }
  if (found == 0 || packed.dtype != "I32" || packed.shape[0] != source.out) {
    const int declared = source.config.bits == 0 ? 4 : source.config.bits;
    tensors.Fail(kPackedPart,
                 fmt::format("is {} {}; expected I32 [{}, {}]: {} bits of {} inputs", packed.dtype,
                             ShapeText(packed.shape), source.out, WordsOf(source.in, declared), declared, source.in));
  }
  return found;
}

// Reads "weight_scale" [out][groups], [out] or one value.
void ReadRowScales(ModuleTensors& tensors, const WeightSource& source, IntegerParts& parts) {
  const TensorView& tensor = tensors.Get(kScalePart);
  const auto& shape = tensor.shape;
  const int64_t groups = shape.size() == 2 ? shape[1] : 1;
  const bool of_tensor = shape.empty() || (std::ranges::all_of(shape, [](int64_t n) { return n == 1; }));
  const bool of_rows = !shape.empty() && shape.size() <= 2 && shape[0] == source.out && groups >= 1;
  // Groups of the declared size, the last one possibly short; else equal ones.
  parts.group = source.config.group_size;
  if (parts.group == 0 || (source.in + parts.group - 1) / parts.group != groups) {
    parts.group = groups >= 1 && source.in % groups == 0 ? source.in / groups : 0;
  }
  if ((!of_tensor && !of_rows) || parts.group == 0) {
    tensors.Fail(kScalePart, fmt::format("has shape {}; expected [1], [{}, 1] or [{}, groups that divide {}]",
                                         ShapeText(shape), source.out, source.out, source.in));
  }
  parts.scales = tensors.Floats(kScalePart, groups > 1);
  if (!of_rows) parts.scales.assign(static_cast<size_t>(source.out), parts.scales.front());
}

}  // namespace

std::unique_ptr<QuantizedWeight> ReadPackedRows(ModuleTensors& tensors, const WeightSource& source) {
  IntegerParts parts{.packing = Packing::kRows, .bits = BitsOfRows(tensors, source)};
  parts.words = tensors.Get(kPackedPart).data.data();
  if (tensors.Find("weight_shape") != nullptr) {
    const std::vector<int32_t> shape = tensors.Integers("weight_shape");
    if (shape.size() != 2 || shape[0] != source.out || shape[1] != source.in) {
      tensors.Fail("weight_shape", fmt::format("is not [{}, {}], the shape of the weight", source.out, source.in));
    }
  }
  ReadRowScales(tensors, source, parts);
  const int64_t groups = static_cast<int64_t>(parts.scales.size()) / source.out;
  parts.zeros.assign(parts.scales.size(), static_cast<uint16_t>(1U << (parts.bits - 1)));
  if (tensors.Find(kZeroPart) != nullptr) {  // packed along the rows' index
    const TensorView& zeros = tensors.Get(kZeroPart, "I32", {WordsOf(source.out, parts.bits), groups});
    for (int64_t group = 0; group < groups; ++group) {
      const auto word = [&](int64_t i) { return WordAt(zeros.data.data(), i * groups + group); };
      for (int64_t row = 0; row < source.out; ++row) {
        parts.zeros[static_cast<size_t>(row * groups + group)] = static_cast<uint16_t>(CodeOf(word, row, parts.bits));
      }
    }
  }
  if (tensors.Find(kIndexPart) != nullptr) {
    tensors.Get(kIndexPart, "I32|I64", {source.in});
    parts.group_index = tensors.Integers(kIndexPart);
    if (std::ranges::all_of(parts.group_index, [](int32_t group) { return group == -1; })) parts.group_index.clear();
  }
  return MakeIntegerWeight(tensors, kIndexPart, source, std::move(parts));
}

}  // namespace kvanta::weights
