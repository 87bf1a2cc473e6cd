// Quantized blocks of the GGUF file that a folder was converted from, stored with its bf16 weights (docs/weights.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/linear/linear.h"
#include "models/safetensors.h"

namespace kvanta::models {

class GgufBlocks {
 public:
  // A safetensors file with another extension: vLLM reads every *.safetensors of a folder as weights.
  static constexpr const char* kName = "gguf_blocks.kvanta";

  // A folder without the file has no blocks.
  explicit GgufBlocks(const std::string& folder);

  // The blocks of a tensor, if the file has them in a format of `store` (kInt8: Q8_0, kInt4: Q4_0, Q4_1). `elements`:
  // the same tensor in the checkpoint. Throws InputError if shapes differ, or values of the first or last row: one of
  // the two files was changed without the other.
  std::optional<kernels::WeightView> Find(const std::string& tensor, const kernels::WeightView& elements,
                                          kernels::WeightType store) const;

 private:
  std::string path_;
  Checkpoint file_;
};

// Element `i` of a weight stored by elements.
float ElementValue(const kernels::WeightView& weight, int64_t i) noexcept;

}  // namespace kvanta::models
