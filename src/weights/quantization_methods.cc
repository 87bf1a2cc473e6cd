#include "weights/quantization_methods.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/quote.h"
#include "kvanta/error.h"
#include "weights/module_names.h"

namespace kvanta::weights {
namespace {

constexpr int64_t kMaxGroup = int64_t{1} << 24;
// Group of a format whose rows have one scale.
constexpr int64_t kWholeRow = int64_t{1} << 30;

// A list of names and patterns; none if absent.
void AddPatterns(const JsonObject& object, std::string_view key, std::vector<std::string>& texts) {
  const Json* list = object.Find(key);
  if (list == nullptr) return;
  const bool valid = list->is_array() && std::ranges::all_of(*list, [](const Json& text) { return text.is_string(); });
  if (!valid) object.Fail(key, "a list of names");
  for (const Json& text : *list) {
    texts.push_back(text.get<std::string>());
    const std::string_view pattern = texts.back();
    if (!pattern.starts_with(kExpressionPrefix)) continue;
    try {
      MatchesExpression(pattern.substr(kExpressionPrefix.size()), "");
    } catch (const InputError& error) {
      throw InputError(fmt::format("{}: {}", object.Name(key), error.what()));
    }
  }
}

// "group_size": -1, 0 or null for one scale per row.
int64_t ReadGroupSize(const JsonObject& object) {
  return std::max<int64_t>(0, object.Int("group_size", -1, kMaxGroup, -1));
}

// Two sizes, as [128, 128].
void ReadBlock(const JsonObject& object, std::string_view key, QuantizationConfig& config) {
  const Json* sizes = object.Find(key);
  if (sizes == nullptr) return;
  const auto valid = [](const Json& size) {
    return size.is_number_unsigned() && size.get<uint64_t>() - 1 < static_cast<uint64_t>(kMaxGroup);
  };
  if (!sizes->is_array() || sizes->size() != 2 || !valid((*sizes)[0]) || !valid((*sizes)[1])) {
    object.Fail(key, "two positive sizes, as [128, 128]");
  }
  config.block = {(*sizes)[0].get<int64_t>(), (*sizes)[1].get<int64_t>()};
  config.format.group = config.block[1];
}

void SetIntegers(int bits, int64_t group, QuantizationConfig& config) {
  config.bits = bits;
  config.group_size = group;
  config.format = {bits == 4 ? CodeType::kInt4 : CodeType::kInt8, GroupScale::kF32, group == 0 ? kWholeRow : group};
}

constexpr QuantizedFormat kFp8Format = {CodeType::kE4M3, GroupScale::kF32, kWholeRow};
constexpr QuantizedFormat kMxfp8Format = {CodeType::kE4M3, GroupScale::kE8M0, 32};
constexpr QuantizedFormat kMxfp4Format = {CodeType::kE2M1, GroupScale::kE8M0, 32};
constexpr QuantizedFormat kNvfp4Format = {CodeType::kE2M1, GroupScale::kE4M3, 16};

// compressed-tensors' arguments of the weights' quantizer, also written by newer versions of ModelOpt.
void ReadWeightArguments(const JsonObject& weights, QuantizationConfig& config) {
  const int64_t bits = weights.Int("num_bits", 1, 64, 8);
  const std::string type = weights.String("type", "int");
  const int64_t group = ReadGroupSize(weights);
  if (type == "int") {
    if (bits > 8) weights.Fail("num_bits", "1 to 8");
    SetIntegers(static_cast<int>(bits), group, config);
    return;
  }
  if (type != "float") weights.Fail("type", "\"int\" or \"float\"");
  if (bits == 8) {
    config.format = group == kMxfp8Format.group ? kMxfp8Format : kFp8Format;
    if (group != 0) config.format.group = group;
    ReadBlock(weights, "block_structure", config);
    return;
  }
  if (bits != 4) weights.Fail("num_bits", "8 (FP8) or 4 (NVFP4, MXFP4)");
  if (group != 16 && group != 32) weights.Fail("group_size", "16 (NVFP4) or 32 (MXFP4)");
  config.format = group == 16 ? kNvfp4Format : kMxfp4Format;
}

void ReadConfigGroups(const JsonObject& quantization, QuantizationConfig& config) {
  constexpr const char* kKey = "config_groups";
  if (!quantization.Has(kKey)) return;
  const JsonObject groups = quantization.Object(kKey);
  for (const auto& [name, value] : groups.Value().items()) {
    if (value.is_null()) continue;
    const JsonObject group = groups.Object(name);
    if (!group.Has("weights")) continue;
    const int before = config.bits;
    ReadWeightArguments(group.Object("weights"), config);
    if (before != 0 && before != config.bits) config.bits = 0;  // groups differ: the tensors tell
  }
}

// Refuses what has to be done to activations at run time.
void CheckTransforms(const JsonObject& quantization) {
  constexpr const char* kTransforms = "transform_config";
  if (quantization.Has(kTransforms) && quantization.Get(kTransforms).is_object()) {
    const JsonObject transforms = quantization.Object(kTransforms);
    if (transforms.Has("config_groups") && !transforms.Get("config_groups").empty()) {
      quantization.Fail(kTransforms, "none (transforms of activations are not supported)");
    }
  }
  constexpr const char* kSparsity = "sparsity_config";
  if (quantization.Has(kSparsity) && quantization.Get(kSparsity).is_object()) {
    const JsonObject sparsity = quantization.Object(kSparsity);
    const std::string format = sparsity.String("format", "dense");
    if (format != "dense") sparsity.Fail("format", "\"dense\" (compressed sparse weights are not supported)");
  }
}

}  // namespace

std::string Upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

void ReadFp8Method(const JsonObject& quantization, QuantizationConfig& config) {
  const std::string format = quantization.String("fmt", "e4m3");
  if (format != "e4m3" && format != "float8_e4m3fn") quantization.Fail("fmt", "\"e4m3\"");
  config.format = kFp8Format;
  ReadBlock(quantization, "weight_block_size", config);
  AddPatterns(quantization, "modules_to_not_convert", config.ignored);
  AddPatterns(quantization, "ignored_layers", config.ignored);
}

void ReadCompressedTensorsMethod(const JsonObject& quantization, QuantizationConfig& config) {
  const std::string format = quantization.String("format", "dense");
  if (format == "marlin-24" || format.find("sparse") != format.npos) {
    quantization.Fail("format",
                      "dense, naive-quantized, int-quantized, float-quantized, pack-quantized, nvfp4-pack-quantized, "
                      "mxfp4-pack-quantized, mxfp8-quantized or mixed-precision");
  }
  CheckTransforms(quantization);
  ReadConfigGroups(quantization, config);
  AddPatterns(quantization, "ignore", config.ignored);
}

void ReadModelOptMethod(const JsonObject& quantization, QuantizationConfig& config) {
  constexpr const char* kKey = "quant_algo";
  AddPatterns(quantization, "exclude_modules", config.ignored);
  AddPatterns(quantization, "ignore", config.ignored);
  const std::string algorithm = Upper(quantization.String(kKey, ""));
  const bool mixes_none = algorithm == "MIXED_PRECISION" && quantization.Has("quantized_layers") &&
                          quantization.Get("quantized_layers").empty();  // a search of the cache alone
  if (algorithm.empty() || algorithm == "NONE" || mixes_none) return ReadConfigGroups(quantization, config);
  if (algorithm == "FP8" || algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    config.format = kFp8Format;
  } else if (algorithm == "FP8_PB_WO" || algorithm == "FP8_BLOCK_SCALES") {
    config.format = kFp8Format;
    config.block = {128, 128};
    config.format.group = 128;
  } else if (algorithm == "MXFP8") {
    config.format = kMxfp8Format;
  } else if (algorithm == "NVFP4" || algorithm == "MIXED_PRECISION") {
    config.format = kNvfp4Format;
  } else {
    quantization.Fail(kKey, "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, NVFP4, MIXED_PRECISION or null");
  }
}

void ReadQuarkMethod(const JsonObject& quantization, QuantizationConfig& config) {
  AddPatterns(quantization, "exclude", config.ignored);
  if (quantization.Has("layer_quant_config") && !quantization.Get("layer_quant_config").empty()) {
    const JsonObject layers = quantization.Object("layer_quant_config");
    for (const auto& [pattern, value] : layers.Value().items()) {
      if (!value.is_null() && layers.Object(pattern).Has("weight")) config.format = kFp8Format;  // the tensors decide
    }
  }
  if (!quantization.Has("global_quant_config")) return;
  const JsonObject global = quantization.Object("global_quant_config");
  if (!global.Has("weight")) return;
  const Json& declared = global.Get("weight");
  if (declared.is_array()) global.Fail("weight", "one quantizer (several in sequence are not supported)");
  const JsonObject weight = global.Object("weight");
  const std::string type = weight.String("dtype");
  if (type == "fp8_e4m3") {
    config.format = kFp8Format;
  } else if (type == "int8") {
    config.format = {CodeType::kInt8, GroupScale::kF32, kWholeRow};
  } else if (type == "fp4" || type == "mx") {
    if (weight.Int("group_size", 0, kMaxGroup, 32) != 32) weight.Fail("group_size", "32 (MXFP4)");
    config.format = kMxfp4Format;
  } else {
    weight.Fail("dtype", "fp8_e4m3, int8 or fp4 (MXFP4)");
  }
}

void ReadAwqMethod(const JsonObject& quantization, QuantizationConfig& config) {
  const std::string version = Upper(quantization.String("version", "gemm"));
  if (version != "GEMM") quantization.Fail("version", "\"gemm\"");
  const char* bits_key = quantization.Has("bits") || !quantization.Has("w_bit") ? "bits" : "w_bit";
  if (quantization.Int(bits_key, 1, 64, 4) != 4) quantization.Fail(bits_key, "4");
  if (!quantization.Bool("zero_point", true)) quantization.Fail("zero_point", "true");
  SetIntegers(
      4,
      quantization.Has("q_group_size") ? quantization.Int("q_group_size", 1, kMaxGroup) : ReadGroupSize(quantization),
      config);
  AddPatterns(quantization, "modules_to_not_convert", config.ignored);
}

void ReadGptqMethod(const JsonObject& quantization, QuantizationConfig& config) {
  const int64_t bits = quantization.Int("bits", 1, 64);
  if (bits != 2 && bits != 3 && bits != 4 && bits != 8) quantization.Fail("bits", "2, 3, 4 or 8");
  // GPTQModel also writes "format", in place of the other key or next to it.
  const std::string_view key = quantization.Has("checkpoint_format") ? "checkpoint_format" : "format";
  const std::string format = quantization.String(key, "gptq");
  if (format != "gptq" && format != "gptq_v2") quantization.Fail(key, "\"gptq\" or \"gptq_v2\"");
  if (quantization.Bool("is_marlin_format", false)) quantization.Fail("is_marlin_format", "false");
  SetIntegers(static_cast<int>(bits), ReadGroupSize(quantization), config);
  config.groups_differ = quantization.Has("dynamic") && !quantization.Get("dynamic").empty();
  config.stores_zero_less_one = format == "gptq";
}

// AutoRound's checkpoints have GPTQ's or AWQ's tensors; modules of other bits or groups are in extra_config.
void ReadAutoRoundMethod(const JsonObject& quantization, QuantizationConfig& config) {
  const std::string packing = quantization.String("packing_format", quantization.String("backend", ""));
  if (packing.find("awq") != packing.npos) {
    config.method = QuantMethod::kAwq;
    ReadAwqMethod(quantization, config);
  } else if (packing.find("fp8") != packing.npos || packing.find("fp4") != packing.npos) {
    quantization.Fail("packing_format", "one with GPTQ's or AWQ's tensors, such as auto_round:auto_gptq");
  } else {
    ReadGptqMethod(quantization, config);
  }
  config.groups_differ = true;
}

void ReadBitsAndBytesMethod(const JsonObject& quantization, QuantizationConfig& config) {
  const bool four = quantization.Bool("load_in_4bit", false) || quantization.Bool("_load_in_4bit", false);
  const bool eight = quantization.Bool("load_in_8bit", false) || quantization.Bool("_load_in_8bit", false);
  if (!four && !eight) return;  // left over from a model that was saved unquantized
  if (four == eight) quantization.Fail("load_in_4bit", "either load_in_4bit or load_in_8bit as true");
  const std::string type = quantization.String("bnb_4bit_quant_type", "nf4");
  if (four && type != "nf4" && type != "fp4") quantization.Fail("bnb_4bit_quant_type", "\"nf4\" or \"fp4\"");
  constexpr int64_t kBlock = 64;  // bitsandbytes' default; the tensors tell
  config.format = eight ? QuantizedFormat{CodeType::kInt8, GroupScale::kF32, kWholeRow}
                        : QuantizedFormat{CodeType::kNf4, GroupScale::kF32, kBlock};
  AddPatterns(quantization, "llm_int8_skip_modules", config.ignored);
}

void ReadMxfp4Method(const JsonObject& quantization, QuantizationConfig& config) {
  config.format = kMxfp4Format;
  AddPatterns(quantization, "modules_to_not_convert", config.ignored);
}

}  // namespace kvanta::weights
