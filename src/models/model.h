// A model: weights on a device, and a forward pass written once against kernels::Ops.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "kernels/ops.h"
#include "models/config/config.h"
#include "parallel/communicator.h"

namespace kvanta::models {

// Rows of a forward pass, in device memory.
struct ForwardBatch {
  std::span<const int32_t> tokens;     // [rows]
  std::span<const int64_t> positions;  // [rows]
  // Rows whose hidden states are returned, in ascending order; absent: all. Where it lacks rows, the last layer's MLP
  // and the final norm are not computed for them.
  std::optional<std::span<const int64_t>> output_rows = {};
  // The hidden states of all rows, too, f32 [rows][hidden], whatever the output rows; null: not needed.
  float* all_hidden = nullptr;
};

class Model {
 public:
  virtual ~Model() = default;
  // With this rank's layers alone.
  const ModelConfig& Config() const noexcept { return config_; }
  int64_t WeightBytes() const noexcept { return weight_bytes_; }
  // Drafted rows that a Forward may have (attention::SequenceSpan): LoadOptions::max_draft_rows with recurrent layers;
  // any number without.
  int64_t MaxDraftRows() const noexcept { return max_draft_rows_; }
  virtual kernels::Ops& ops() const noexcept = 0;
  // One per layer, for the attention backend: with this rank's heads.
  virtual std::vector<attention::AttentionSpec> AttentionLayers() const = 0;
  // Inputs of the first layer: f32 [tokens][hidden].
  virtual void Embed(std::span<const int32_t> tokens, float* hidden) noexcept = 0;
  // Final hidden states after the last norm of the output rows, divided by config.logits_divisor, f32
  // [output rows][hidden]; `hidden` has [rows][hidden].
  // In a pipeline, `hidden` goes in with the states that the rank before gave, and comes out with those for the next.
  // A predictor (LoadPredictor) takes it with the hidden states before the tokens, f32 [rows][hidden].
  // rows <= LoadOptions::max_rows. No allocation.
  virtual void Forward(const ForwardBatch& batch, attention::Backend& backend, attention::Plan& plan,
                       float* hidden) noexcept = 0;
  // Advances the states of recurrent layers over the drafted rows of the last Forward that were accepted.
  // `plan`: that Forward's, after Backend::AcceptDrafts.
  virtual void AdvanceStates(attention::Backend& backend, attention::Plan& plan) noexcept = 0;
  // Logits: hidden f32 [rows][hidden] -> out f32 [rows][vocab], and argmaxes of its rows [rows] unless null. Only of
  // rank 0; the others must call it as well, but not those of a pipeline.
  virtual void Logits(const float* hidden, int64_t rows, float* out, kernels::RowArgmax* argmaxes) noexcept = 0;

 protected:
  ModelConfig config_;
  int64_t weight_bytes_ = 0;
  int64_t max_draft_rows_ = std::numeric_limits<int64_t>::max();
};

// Consecutive layers of a model.
struct LayerRange {
  int first = 0;
  int count = 0;

  int End() const noexcept { return first + count; }
};

struct LoadOptions {
  kernels::WeightType store = kernels::WeightType::kBf16;  // type of matrices; embeddings: EmbeddingType()
  bool keep_types = false;  // matrices of a GGUF file keep their types where linear layers can; `store` for the others
  bool keep_quantized = true;  // quantized weights of a checkpoint stay as they are, unless `store` is kF32
  int64_t max_rows = 512;      // rows of the largest Forward
  int64_t max_draft_rows = 0;  // drafted rows of a Forward: models with recurrent layers keep inputs of as many
  int64_t max_positions = 0;   // rope table length; 0: config.max_position
  parallel::Communicator* ranks = nullptr;  // share the model, each loads its part; null: this process alone
  bool expert_parallel = false;             // ranks divide the experts of a layer instead of each expert
  // Layers of this rank of a pipeline; absent: all. The first rank has the embedding and the output head, too, and the
  // last one the norm before the head.
  std::optional<LayerRange> layers = {};
  Model* predicts_for = nullptr;  // set by LoadPredictor
};

// Loads a folder in Hugging Face layout. Throws InputError: unknown architecture (lists the known), missing or
// misshapen tensor (names it, expected and found shape), NaN or infinite weight, unreadable file.
std::unique_ptr<Model> Load(const std::string& folder, kernels::Ops& ops, const LoadOptions& options);

// Loads a folder's predictor of further tokens (TensorNames::Predictor) as a model of one layer: its row of a token
// takes the hidden state of the position before, and gives one from which the next token is predicted. It shares
// embeddings and output matrix with `target`, which was loaded from the same folder and must outlive it. Throws what
// Load throws.
std::unique_ptr<Model> LoadPredictor(const std::string& folder, Model& target, const LoadOptions& options);

// Supported names of config.json's "architectures".
std::vector<std::string> KnownArchitectures();

}  // namespace kvanta::models
