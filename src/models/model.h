// A model: weights on a device and a forward written once against kernels::Ops. One file per architecture.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "kernels/ops.h"
#include "models/config.h"

namespace kvanta::models {

// In the memory of the model's device, as all that a model computes with.
struct ForwardBatch {
  std::span<const int32_t> tokens;     // [rows]
  std::span<const int64_t> positions;  // [rows]
  // Rows whose hidden states are returned, in ascending order; absent: all. Where it lacks rows, the last layer's MLP
  // and the final norm are not computed for them.
  std::optional<std::span<const int64_t>> output_rows = {};
};

class Model {
 public:
  virtual ~Model() = default;
  const ModelConfig& Config() const noexcept { return config_; }
  int64_t WeightBytes() const noexcept { return weight_bytes_; }
  // Those that it was loaded for.
  virtual kernels::Ops& ops() const noexcept = 0;
  // Per layer, for the attention backend.
  virtual std::vector<attention::LayerAttention> AttentionLayers() const = 0;
  // Final hidden states after the last norm of the output rows, f32 [output rows][hidden]; `hidden` has [rows][hidden].
  // rows <= max_rows given to Load. No allocation.
  virtual void Forward(const ForwardBatch& batch, attention::Backend& backend, attention::Plan& plan,
                       float* hidden) noexcept = 0;
  // Logits of chosen rows: hidden f32 [rows][hidden] -> out f32 [rows][vocab], and peaks [rows] unless null.
  virtual void Logits(const float* hidden, int64_t rows, float* out, kernels::RowArgmax* argmaxes) noexcept = 0;

 protected:
  ModelConfig config_;
  int64_t weight_bytes_ = 0;
};

struct LoadOptions {
  kernels::WeightType store = kernels::WeightType::kBf16;  // how matrices are kept; embeddings: EmbeddingType()
  int64_t max_rows = 512;                                  // rows of the largest Forward
  int64_t max_positions = 0;                               // rope table length; 0: config.max_position
};

// Loads a folder in Hugging Face layout. Throws InputError: unknown architecture (lists the known), missing or
// misshapen tensor (names it, expected and found shape), NaN or infinite weight, unreadable file.
std::unique_ptr<Model> Load(const std::string& folder, kernels::Ops& ops, const LoadOptions& options);

// Names of config.json's "architectures" that Load() knows.
std::vector<std::string> KnownArchitectures();

}  // namespace kvanta::models
