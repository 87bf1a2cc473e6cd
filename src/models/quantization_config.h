// The KV cache format that a checkpoint declares; quantized weights are refused.
#pragma once

#include <string>

#include "models/json.h"

namespace kvanta::models {

// config.json's "quantization_config" (compressed-tensors, ModelOpt, Quark): the scheme text of the declared cache, ""
// without one. Throws InputError when weights are quantized or the declaration is unknown.
std::string ReadQuantizationConfig(const JsonObject& quantization);

// The same for hf_quant_config.json of ModelOpt.
std::string ReadHfQuantConfig(const JsonObject& root);

}  // namespace kvanta::models
