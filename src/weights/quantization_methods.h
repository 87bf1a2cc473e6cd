// Settings of the methods of quantized weights in a "quantization_config". Each function fills in the format, the
// parameters of packing and the ignored modules, and throws InputError for settings that are not supported.
#pragma once

#include <string>

#include "base/json.h"
#include "weights/quantization_config.h"

namespace kvanta::weights {

std::string Upper(std::string text);

void ReadFp8Method(const JsonObject& quantization, QuantizationConfig& config);
void ReadCompressedTensorsMethod(const JsonObject& quantization, QuantizationConfig& config);
// Also the object "quantization" of hf_quant_config.json.
void ReadModelOptMethod(const JsonObject& quantization, QuantizationConfig& config);
void ReadQuarkMethod(const JsonObject& quantization, QuantizationConfig& config);
void ReadAwqMethod(const JsonObject& quantization, QuantizationConfig& config);
void ReadGptqMethod(const JsonObject& quantization, QuantizationConfig& config);
void ReadBitsAndBytesMethod(const JsonObject& quantization, QuantizationConfig& config);
void ReadMxfp4Method(const JsonObject& quantization, QuantizationConfig& config);

}  // namespace kvanta::weights
