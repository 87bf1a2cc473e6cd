// Quantized weights of Hugging Face checkpoints, by the tensors of a module: one file per family of layouts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "weights/quantization_config.h"
#include "weights/quantized/module_tensors.h"
#include "weights/quantized_weight.h"

namespace kvanta::weights {

struct FoundWeight {
  std::unique_ptr<QuantizedWeight> weight;  // null: the module's weight is stored by elements
  std::vector<std::string> tensors;         // names of those that were read
};

// The quantized weight [out][in] of a module ("model.layers.0.mlp.up_proj"); it views the checkpoint's memory. Throws
// InputError for missing or misshapen tensors, scales that are not finite, NaN codes, and layouts that are not known.
FoundWeight FindQuantizedWeight(const Checkpoint& checkpoint, const QuantizationConfig& config,
                                const std::string& module, int64_t out, int64_t in, ThreadPool& threads);

// Shape [out][in] of a weight, and how it was quantized.
struct WeightSource {
  const QuantizationConfig& config;
  int64_t out = 0;
  int64_t in = 0;
};

// F8_E4M3 with scales of the tensor, of channels, or of blocks: "weight", and "weight_scale", "weight_scale_inv" or
// "scale".
std::unique_ptr<QuantizedWeight> ReadFp8(ModuleTensors& tensors, const WeightSource& source);
// I8: compressed-tensors and Quark ("weight", "weight_scale"), bitsandbytes ("weight", "SCB").
std::unique_ptr<QuantizedWeight> ReadInt8(ModuleTensors& tensors, const WeightSource& source);
// Integers packed in I32 along rows: compressed-tensors ("weight_packed", "weight_scale", "weight_zero_point").
std::unique_ptr<QuantizedWeight> ReadPackedRows(ModuleTensors& tensors, const WeightSource& source);
// Integers packed in I32 along columns ("qweight", "qzeros", "scales", "g_idx").
std::unique_ptr<QuantizedWeight> ReadGptq(ModuleTensors& tensors, const WeightSource& source);
// Integers packed in I32 across columns, in AWQ's order ("qweight", "qzeros", "scales").
std::unique_ptr<QuantizedWeight> ReadAwq(ModuleTensors& tensors, const WeightSource& source);
// E2M1 in U8 or I8: NVFP4 (scales in F8_E4M3) and MXFP4 (in U8 or F8_E8M0) of compressed-tensors, ModelOpt and Quark,
// and of DeepSeek V4.
std::unique_ptr<QuantizedWeight> ReadFp4(ModuleTensors& tensors, const WeightSource& source);
// NF4 or bitsandbytes' own FP4 ("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4").
std::unique_ptr<QuantizedWeight> ReadBitsAndBytes4(ModuleTensors& tensors, const WeightSource& source);

}  // namespace kvanta::weights
