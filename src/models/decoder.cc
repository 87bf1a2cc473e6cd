#include "models/decoder.h"

#include <fmt/format.h>

#include <cmath>
#include <string>
#include <vector>

#include "kvanta/error.h"
#include "models/layer_blocks.h"
#include "models/rope.h"
#include "models/weight_count.h"
#include "models/weights.h"

namespace kvanta::models {
namespace {

using kernels::Linear;
using kernels::Ops;

struct Layer {
  Buffer attention_norm, mlp_norm;  // f32 [hidden]
  std::unique_ptr<AttentionBlock> attention;
  std::unique_ptr<MlpBlock> mlp;
};

class Decoder final : public Model {
 public:
  Decoder(const ModelConfig& config, const Checkpoint& checkpoint, Ops& ops, const LoadOptions& options) : ops_(ops) {
    config_ = config;
    WeightReader reader(checkpoint, ops);
    const kernels::WeightType embedding_type = EmbeddingType(options.store);
    embedding_ = reader.Linear({{"model.embed_tokens", config.vocab}}, config.hidden, false,
                               {embedding_type, kInt16Activations});
    const BlockSource source{.reader = reader, .ops = ops, .config = config_, .store = options.store};
    for (int layer = 0; layer < config.layers; ++layer) layers_.push_back(ReadLayer(source, layer));
    final_norm_ = reader.Vector("model.norm.weight", config.hidden);
    if (!config.tied_embeddings) {
      lm_head_ = reader.Linear({{"lm_head", config.vocab}}, config.hidden, false, {embedding_type, kInt16Activations});
    }
    reader.CheckUnusedTensors(config.layers, config.num_nextn_predict_layers);
    weight_bytes_ = reader.Bytes();
    MakeRopeTable(options.max_positions == 0 ? config.max_position : options.max_positions);
    AllocateScratch(options.max_rows);
  }

  Ops& ops() const noexcept override { return ops_; }

  std::vector<attention::LayerAttention> AttentionLayers() const override {
    std::vector<attention::LayerAttention> layers;
    for (const int window : config_.sliding_window) {
      attention::LayerAttention layer;
      layer.heads = config_.heads;
      layer.kv_heads = config_.kv_heads;
      layer.head_dim = config_.head_dim;
      layer.rope_dim = config_.latent.rope_dim;
      layer.softmax_scale = static_cast<float>(config_.SoftmaxScale());
      layer.sliding_window = window;
      layers.push_back(layer);
    }
    return layers;
  }

  void Forward(const ForwardBatch& batch, attention::Backend& backend, attention::Plan& plan,
               float* hidden) noexcept override {
    auto rows = static_cast<int64_t>(batch.tokens.size());
    ops_.Embed(*embedding_, batch.tokens.data(), rows, hidden);
    AttentionStep step{.layer = 0,
                       .rows = rows,
                       .positions = batch.positions.data(),
                       .rope_table = rope_table_.as<float>(),
                       .backend = &backend,
                       .plan = &plan};
    for (; step.layer < config_.layers; ++step.layer) {
      Layer& layer = layers_[step.layer];
      RmsNorm(layer.attention_norm, hidden, rows, normed_);
      layer.attention->Forward(step, normed_, change_);
      ops_.Add(hidden, change_, rows * config_.hidden);
      if (batch.output_rows && step.layer + 1 == config_.layers) rows = KeepRows(*batch.output_rows, hidden);
      if (rows == 0) return;
      RmsNorm(layer.mlp_norm, hidden, rows, normed_);
      layer.mlp->Forward(normed_, rows, change_);
      ops_.Add(hidden, change_, rows * config_.hidden);
    }
    RmsNorm(final_norm_, hidden, rows, hidden);
  }

  void Logits(const float* hidden, int64_t rows, float* out, kernels::RowArgmax* argmaxes) noexcept override {
    (lm_head_ ? *lm_head_ : *embedding_).Multiply(hidden, rows, out, config_.vocab, argmaxes);
  }

 private:
  // Moves the rows to the front of `hidden` and returns their number.
  int64_t KeepRows(std::span<const int64_t> rows, float* hidden) noexcept {
    const auto count = static_cast<int64_t>(rows.size());
    ops_.Gather(hidden, config_.hidden, rows.data(), count, normed_);
    ops_.Copy(normed_, config_.hidden, count, config_.hidden, hidden, config_.hidden);
    return count;
  }

  static Layer ReadLayer(const BlockSource& source, int index) {
    const ModelConfig& config = source.config;
    const std::string prefix = fmt::format("model.layers.{}.", index);
    Layer layer;
    layer.attention_norm = source.reader.Vector(prefix + "input_layernorm.weight", config.hidden);
    layer.mlp_norm = source.reader.Vector(prefix + "post_attention_layernorm.weight", config.hidden);
    layer.attention =
        config.latent.rank != 0 ? ReadLatentAttention(source, prefix) : ReadGroupedAttention(source, prefix);
    layer.mlp = config.experts.In(index)
                    ? ReadExperts(source, prefix + "mlp.")
                    : ReadGatedMlp(source, prefix + "mlp.", config.intermediate_size, config.mlp_bias);
    return layer;
  }

  void MakeRopeTable(int64_t positions) {
    if (positions < 1 || positions > config_.max_position) {
      throw InputError(fmt::format("{} positions; this model takes 1 to {}", positions, config_.max_position));
    }
    // First what is checked against the machine's memory.
    rope_table_ = ops_.device().Allocate(positions * config_.rotary_dim * sizeof(float));
    std::vector<float> table(positions * config_.rotary_dim);
    FillRopeTable(MakeRopeFrequencies(config_.rope, config_.rotary_dim, positions), table);
    ops_.device().CopyIn(rope_table_.data(), table.data(), rope_table_.bytes());
  }

  // One allocation for the activations of the largest batch; Forward() only hands out its parts. Blocks work one after
  // the other, in the same memory.
  void AllocateScratch(int64_t max_rows) {
    if (max_rows < 1) throw InputError(fmt::format("{} rows in a batch; at least 1 is needed", max_rows));
    const int64_t floats = Place(nullptr, max_rows);
    scratch_ = ops_.device().Allocate(floats * sizeof(float));
    Place(scratch_.as<float>(), max_rows);
  }

  // Returns the floats that are needed.
  int64_t Place(float* memory, int64_t rows) noexcept {
    Scratch shared(memory);
    normed_ = shared.Take(rows * config_.hidden);
    change_ = shared.Take(rows * config_.hidden);
    for (Layer& layer : layers_) {
      shared.OverlapScratch(*layer.attention, rows);
      shared.OverlapScratch(*layer.mlp, rows);
    }
    return shared.Used();
  }

  void RmsNorm(const Buffer& weight, const float* x, int64_t rows, float* out) noexcept {
    ops_.RmsNorm(x, config_.hidden, weight.as<float>(), static_cast<float>(config_.rms_eps), rows, config_.hidden, out,
                 config_.hidden);
  }

  Ops& ops_;
  std::unique_ptr<Linear> embedding_;
  std::vector<Layer> layers_;
  Buffer final_norm_;
  std::unique_ptr<Linear> lm_head_;  // null: the embedding's weight serves
  Buffer rope_table_;                // f32 [positions][rotary_dim], cos | sin
  Buffer scratch_;
  // Parts of it, each f32 [max_rows][hidden]:
  float* normed_ = nullptr;
  float* change_ = nullptr;  // what a block adds to the hidden state
};

}  // namespace

std::unique_ptr<Model> LoadDecoder(const ModelConfig& config, const Checkpoint& checkpoint, kernels::Ops& ops,
                                   const LoadOptions& options) {
  return std::make_unique<Decoder>(config, checkpoint, ops, options);
}

}  // namespace kvanta::models
