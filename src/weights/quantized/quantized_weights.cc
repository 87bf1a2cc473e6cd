#include "weights/quantized/quantized_weights.h"

#include <fmt/format.h>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::weights {
namespace {

using Reader = std::unique_ptr<QuantizedWeight> (*)(ModuleTensors& tensors, const WeightSource& source);

bool IsElement(const std::string& dtype) {
  return dtype == "BF16" || dtype == "F16" || dtype == "F32";
}

// The reader of a module with a tensor "weight" that is not stored by elements.
Reader ReaderOfWeight(const Checkpoint& checkpoint, const TensorView& weight, const ModuleTensors& tensors) {
  if (weight.dtype == "F8_E4M3") return ReadFp8;
  // DeepSeek V4: bytes of two codes, which safetensors calls integers.
  const TensorView* scales = checkpoint.Find(tensors.Name("scale"));
  if (weight.dtype == "I8" && scales != nullptr && scales->dtype == "F8_E8M0") return ReadFp4;
  if (weight.dtype == "I8") return ReadInt8;
  if (weight.dtype == "U8") return ReadFp4;
  tensors.Fail("weight",
               fmt::format("is stored as {}; quantized weights are read from F8_E4M3, I8 or U8 (FP4)", weight.dtype));
}

// Null for weights stored by elements and for missing ones.
Reader FindReader(const Checkpoint& checkpoint, const QuantizationConfig& config, const ModuleTensors& tensors) {
  const auto find = [&](std::string_view part) { return checkpoint.Find(tensors.Name(part)); };
  if (find("qweight") != nullptr) return config.method == QuantMethod::kAwq ? ReadAwq : ReadGptq;
  if (const TensorView* packed = find("weight_packed")) return packed->dtype == "U8" ? ReadFp4 : ReadPackedRows;
  if (find("weight.absmax") != nullptr) return ReadBitsAndBytes4;
  const TensorView* weight = find("weight");
  if (weight == nullptr || IsElement(weight->dtype)) return nullptr;
  return ReaderOfWeight(checkpoint, *weight, tensors);
}

}  // namespace

FoundWeight FindQuantizedWeight(const Checkpoint& checkpoint, const QuantizationConfig& config,
                                const std::string& module, int64_t out, int64_t in, ThreadPool& threads) {
  ModuleTensors tensors(checkpoint, module, threads);
  const Reader read = FindReader(checkpoint, config, tensors);
  if (read == nullptr) {
    if (config.method != QuantMethod::kCompressedTensors) return {};
    // llm-compressor with save_compressed=False: the weights by elements, and the scales to quantize them with.
    tensors.IgnoreWeightScales();
    return {.weight = nullptr, .tensors = tensors.Read()};
  }
  if (config.method == QuantMethod::kNone) {
    throw InputError(
        fmt::format("{}: the weight of {} is quantized, but config.json declares no method for weights "
                    "(quantization_config.quant_method)",
                    checkpoint.Name(), Quote(module)));
  }
  if (checkpoint.Find(tensors.Name("pre_quant_scale")) != nullptr) {
    tensors.Fail("pre_quant_scale", "scales activations before the product, which is not supported");
  }
  FoundWeight found{.weight = read(tensors, {.config = config, .out = out, .in = in}), .tensors = {}};
  tensors.IgnoreActivations();
  found.tensors = tensors.Read();
  return found;
}

}  // namespace kvanta::weights
