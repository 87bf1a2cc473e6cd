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
  void Finish(const AttentionStep& step, const Buffer& norm, int width, float* rows) noexcept;
  void Select(const AttentionStep& step, const float* x, const float* low) noexcept;

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const kernels::CompressorShape shape_;
  std::unique_ptr<kernels::Linear> to_inputs_;   // hidden -> inputs of a token
  Buffer entry_bias_, key_bias_;                 // f32, of the gates
  Buffer entry_norm_, key_norm_;                 // f32 [channels]
  std::unique_ptr<kernels::Linear> to_queries_;  // q_lora_rank -> heads * key_dim; null without an indexer
  std::unique_ptr<kernels::Linear> to_weights_;  // hidden -> heads
  DraftRows drafts_, draft_positions_;           // inputs of drafted tokens, and int64 positions
  int inputs_layer_ = 0;                         // of the last Forward
  // Scratch, f32 [rows][...]:
  float* inputs_ = nullptr;
  float* entries_ = nullptr;  // entry_dim: in the row of an entry's last token
  float* keys_ = nullptr;     // key_dim, likewise
  float* queries_ = nullptr;
  float* weights_ = nullptr;
};

}  // namespace kvanta::models
