// Compressor of a layer (DeepSeek V4): makes an entry of some consecutive tokens, which attention reads in their place,
// and with an indexer a key of each entry, by which the entries are chosen that a query attends to.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/compression/compressor.h"
#include "models/blocks/draft_rows.h"
#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

class Compressor {
 public:
  // `module`: of the layer's attention, "layers.0.attn.".
  Compressor(const BlockSource& source, const LayerSpec& spec, const std::string& module);

  void Place(Scratch& scratch, int64_t rows) noexcept;
  // Appends the entries that end in the step's rows, and chooses entries for the rows. x: f32 [rows][hidden], normed;
  // low: f32 [rows][q_lora_rank], from which the layer's own queries are projected, too.
  void Forward(const AttentionStep& step, const float* x, const float* low) noexcept;
  // AttentionBlock::AdvanceStates.
  void AdvanceStates(const AttentionStep& step) noexcept;

 private:
  int64_t CountEntries(const AttentionStep& step, const cache::StateStep& states) noexcept;
  void Finish(const AttentionStep& step, const Buffer& norm, int64_t entries, int width, float* rows) noexcept;
  void Select(const AttentionStep& step, const float* x, const float* low) noexcept;

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const kernels::CompressorShape shape_;
  std::unique_ptr<kernels::Linear> to_inputs_;   // hidden -> inputs of a token
  std::vector<float> entry_bias_, key_bias_;     // of the gates
  Buffer entry_norm_, key_norm_;                 // f32 [channels]
  std::unique_ptr<kernels::Linear> to_queries_;  // q_lora_rank -> heads * key_dim; null without an indexer
  std::unique_ptr<kernels::Linear> to_weights_;  // hidden -> heads
  DraftRows drafts_;                             // inputs of drafted tokens
  std::vector<int64_t> draft_positions_;
  int inputs_layer_ = 0;  // of the last Forward
  // Scratch, f32 [rows][...], but for the integers:
  float* inputs_ = nullptr;
  float* entries_ = nullptr;  // [entries][entry_dim]
  float* keys_ = nullptr;     // [entries][key_dim]
  float* queries_ = nullptr;
  float* weights_ = nullptr;
  int64_t* first_entry_ = nullptr;      // [sequences]
  int64_t* entry_positions_ = nullptr;  // [entries]: of their first tokens
};

}  // namespace kvanta::models
