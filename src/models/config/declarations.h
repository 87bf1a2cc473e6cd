// Declarations of quantized weights and of a quantized cache in a model's files, for config.cc.
#pragma once

#include <string>

#include "models/config/config.h"

namespace kvanta::models {

// Adds what a file declares about weights and cache. Both files may describe the same weights.
void Declare(const weights::QuantizationConfig& quantization, const std::string& file, ModelConfig& config);

}  // namespace kvanta::models
