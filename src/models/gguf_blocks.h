// The quantized blocks of the GGUF file that a folder was converted from, beside its bf16 weights (docs/weights.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/linear/linear.h"
#include "models/safetensors.h"

namespace kvanta::models {

class GgufBlocks {
 public:
  // A safetensors file of another ending: some loaders read every *.safetensors of a folder as weights (vLLM does).
  static constexpr const char* kName = "gguf_blocks.kvanta";

  // Without such a file in the folder, nothing is found.
  explicit GgufBlocks(const std::string& folder);

  // The blocks of a tensor, if the file has them in a format that `store` (kInt8: Q8_0, kInt4: Q4_0, Q4_1) keeps.
  // `elements` are the same tensor's in the checkpoint. Throws InputError if the shapes do not fit, or the first or the
  // last row is not the same weights: then one of the two files was changed without the other.
  std::optional<kernels::WeightView> Find(const std::string& tensor, const kernels::WeightView& elements,
                                          kernels::WeightType store) const;

 private:
  std::string path_;
  Checkpoint file_;
};

// Element `i` of a weight that is not blocks.
float ElementValue(const kernels::WeightView& weight, int64_t i) noexcept;

}  // namespace kvanta::models
