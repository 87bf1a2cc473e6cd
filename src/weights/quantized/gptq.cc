// GPTQ (AutoGPTQ, GPTQModel): the weight transposed, packed along k.
#include <fmt/format.h>

#include "weights/quantized/integer_weight.h"

namespace kvanta::weights {
namespace {

// Ones in the lowest bits of all codes of a word. Codes of 3 bits go over three words.
uint32_t OnesOfCodes(int bits, int64_t word) {
  constexpr uint32_t kThreeBits[3] = {0x49249249U, 0x92492492U, 0x24924924U};
  switch (bits) {
    case 2:
      return 0x55555555U;
    case 3:
      return kThreeBits[word % 3];
    case 4:
      return 0x11111111U;
    default:
      return 0x01010101U;
  }
}

// Bits of a code by the rows of "qweight".
int BitsOfColumns(ModuleTensors& tensors, const WeightSource& source) {
  constexpr const char* kPart = "qweight";
  const TensorView& weight = tensors.Get(kPart);
  for (const int bits : {2, 3, 4, 8}) {
    if (source.in * bits % 32 != 0 || weight.shape.size() != 2 || weight.shape[0] != source.in * bits / 32) continue;
    tensors.Get(kPart, "I32", {weight.shape[0], source.out});
    return bits;
  }
  const int declared = source.config.bits == 0 ? 4 : source.config.bits;
  tensors.Fail(kPart, fmt::format("is {} {}; expected I32 [{}, {}]: {} bits of {} inputs", weight.dtype,
                                  ShapeText(weight.shape), source.in * declared / 32, source.out, declared, source.in));
}

// [out][groups], from words [groups][out * bits / 32]. The older format stores zero points less one, subtracted from
// whole words, so that one is added to these.
std::vector<uint16_t> ReadGptqZeros(ModuleTensors& tensors, const WeightSource& source, int64_t groups, int bits) {
  const int64_t words = source.out * bits / 32;
  const TensorView& tensor = tensors.Get("qzeros", "I32", {groups, words});
  std::vector<uint16_t> zeros(static_cast<size_t>(source.out * groups));
  for (int64_t group = 0; group < groups; ++group) {
    const auto word = [&](int64_t i) {
      const uint32_t stored = WordAt(tensor.data.data(), group * words + i);
      return source.config.stores_zero_less_one ? stored + OnesOfCodes(bits, i) : stored;
    };
    for (int64_t row = 0; row < source.out; ++row) {
      zeros[static_cast<size_t>(row * groups + group)] = static_cast<uint16_t>(CodeOf(word, row, bits));
    }
  }
  return zeros;
}

}  // namespace

std::unique_ptr<QuantizedWeight> ReadGptq(ModuleTensors& tensors, const WeightSource& source) {
  IntegerParts parts{.packing = Packing::kColumns, .bits = BitsOfColumns(tensors, source)};
  parts.words = tensors.Get("qweight").data.data();
  parts.group = source.config.group_size == 0 ? source.in : source.config.group_size;
  if (source.in % parts.group != 0 || source.out * parts.bits % 32 != 0) {
    tensors.Fail("qweight", fmt::format("has {} inputs and {} outputs; expected multiples of the group size ({}) and "
                                        "of whole words of {} bits",
                                        source.in, source.out, parts.group, parts.bits));
  }
  const int64_t groups = source.in / parts.group;
  tensors.Get("scales", "F16|BF16|F32", {groups, source.out});
  const std::vector<float> scales = tensors.Floats("scales", true);
  parts.scales.resize(scales.size());
  for (int64_t row = 0; row < source.out; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      parts.scales[static_cast<size_t>(row * groups + group)] = scales[static_cast<size_t>(group * source.out + row)];
    }
  }
  parts.zeros = ReadGptqZeros(tensors, source, groups, parts.bits);
  if (tensors.Find("g_idx") != nullptr) {
    tensors.Get("g_idx", "I32|I64", {source.in});
    parts.group_index = tensors.Integers("g_idx");
  }
  return MakeIntegerWeight(tensors, "g_idx", source, std::move(parts));
}

}  // namespace kvanta::weights
