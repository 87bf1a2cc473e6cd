// Declaration of quantized weights and of a KV cache format in a checkpoint's configuration.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "weights/quantized_weight.h"

namespace kvanta {
class JsonObject;
}

namespace kvanta::weights {

// Method that quantized the weights, which tells how tensors of equal names are to be read.
enum class QuantMethod : uint8_t {
  kNone,               // weights are elements
  kFp8,                // "fp8" (DeepSeek, Qwen3, AutoFP8), "fbgemm_fp8"
  kCompressedTensors,  // "compressed-tensors"
  kModelOpt,           // "modelopt", or hf_quant_config.json
  kQuark,              // "quark"
  kAwq,                // "awq", version gemm
  kGptq,               // "gptq"
  kBitsAndBytes,       // "bitsandbytes"
  kMxfp4,              // "mxfp4": experts of GPT-OSS
};

// Name in "quant_method"; "" for kNone.
std::string_view Name(QuantMethod method) noexcept;

struct QuantizationConfig {
  QuantMethod method = QuantMethod::kNone;
  // Format of most weights, as far as the configuration tells; a group of 0: one scale for a row. The tensors decide.
  QuantizedFormat format;
  int bits = 0;                           // bits of a packed integer; 0: not declared
  int64_t group_size = 0;                 // group size of packed integers; 0: a row, or not declared
  bool groups_differ = false;             // modules may have other group sizes: the shapes of their scales tell
  bool stores_zero_less_one = false;      // GPTQ, except for its format v2
  std::array<int64_t, 2> block = {0, 0};  // rows and columns that share an FP8 scale; {0, 0}: not declared
  std::vector<std::string> ignored;       // patterns of modules whose weights are elements
  std::string kv_cache;                   // scheme text of the declared cache, "" without one
  // Scheme texts of single layers (ModelOpt's search): the other layers are not quantized. Empty: kv_cache is that of
  // all layers.
  std::map<int64_t, std::string> kv_cache_layers;
  // Reason why the declared cache cannot be had, as an error's text; "" if it can, or none is declared. An explicit
  // format overrides it.
  std::string kv_cache_error;

  // True if a pattern of `ignored` covers the module: its name or a part of it of whole components, with `*` as a
  // wildcard, or a regular expression ("re:...").
  bool IsIgnored(std::string_view module) const;
};

// config.json's "quantization_config". Throws InputError for an unknown method (lists the known) and for settings of
// weights that are not supported; a cache that is not supported goes to kv_cache_error.
QuantizationConfig ReadQuantizationConfig(const JsonObject& quantization);

// The same for hf_quant_config.json of ModelOpt.
QuantizationConfig ReadHfQuantConfig(const JsonObject& root);

}  // namespace kvanta::weights
