#include "models/decoder.h"

#include <fmt/format.h>

#include <cmath>
#include <string>
#include <vector>

#include "kvanta/error.h"
#include "models/rope.h"
#include "models/weight_count.h"
#include "models/weights.h"

namespace kvanta::models {
namespace {

using kernels::Linear;
using kernels::Ops;

// Where weights are blocks, q, k, v and logits take activations of 16 bits: most for the least work (docs/weights.md).
constexpr bool kWideX = true;

// Weights of one block. Norm weights: f32 in device memory.
struct Block {
  Buffer attention_norm, mlp_norm;        // [hidden]
  Buffer q_norm, k_norm;                  // [head_dim]; empty without q/k norms
  std::unique_ptr<Linear> qkv;            // hidden -> (heads + 2 kv_heads) * head_dim: q | k | v
  std::unique_ptr<Linear> attention_out;  // heads * head_dim -> hidden
  std::unique_ptr<Linear> gate_up;        // hidden -> 2 ffn: gate | up
  std::unique_ptr<Linear> down;           // ffn -> hidden
};

class Decoder final : public Model {
 public:
  Decoder(const ModelConfig& config, const Checkpoint& checkpoint, Ops& ops, const LoadOptions& options) : ops_(ops) {
    config_ = config;
    WeightReader reader(checkpoint, ops);
    const kernels::WeightType embedding_type = EmbeddingType(options.store);
    embedding_ = reader.Linear({{"model.embed_tokens", config.vocab}}, config.hidden, false, {embedding_type, kWideX});
    for (int layer = 0; layer < config.layers; ++layer) {
      blocks_.push_back(ReadBlock(reader, layer, options.store));
    }
    final_norm_ = reader.Vector("model.norm.weight", config.hidden);
    if (!config.tied_embeddings) {
      lm_head_ = reader.Linear({{"lm_head", config.vocab}}, config.hidden, false, {embedding_type, kWideX});
    }
    reader.RefuseUnread();
    weight_bytes_ = reader.Bytes();
    MakeRopeTable(options.max_positions == 0 ? config.max_position : options.max_positions);
    AllocateWorkspace(options.max_rows);
  }

  std::vector<attention::LayerAttention> AttentionLayers() const override {
    std::vector<attention::LayerAttention> layers;
    for (const int window : config_.sliding_window) {
      attention::LayerAttention layer;
      layer.heads = config_.heads;
      layer.kv_heads = config_.kv_heads;
      layer.head_dim = config_.head_dim;
      layer.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
      layer.sliding_window = window;
      layers.push_back(layer);
    }
    return layers;
  }

  void Forward(const ForwardBatch& batch, attention::Backend& backend, attention::Plan& plan,
               float* hidden) noexcept override {
    const auto rows = static_cast<int64_t>(batch.tokens.size());
    ops_.Embed(*embedding_, batch.tokens.data(), rows, hidden);
    for (int layer = 0; layer < config_.layers; ++layer) {
      const Block& block = blocks_[layer];
      RmsNorm(block.attention_norm, hidden, rows, normed_);
      Attend(block, layer, rows, batch.positions.data(), backend, plan);
      ops_.Add(hidden, projected_, rows * config_.hidden);
      RmsNorm(block.mlp_norm, hidden, rows, normed_);
      block.gate_up->Forward(normed_, rows, gate_up_, int64_t{2} * config_.ffn);
      ops_.SiluMul(gate_up_, rows, config_.ffn, gated_);
      block.down->Forward(gated_, rows, projected_, config_.hidden);
      ops_.Add(hidden, projected_, rows * config_.hidden);
    }
    RmsNorm(final_norm_, hidden, rows, hidden);
  }

  void Logits(const float* hidden, int64_t rows, float* out) noexcept override {
    (lm_head_ ? *lm_head_ : *embedding_).Forward(hidden, rows, out, config_.vocab);
  }

 private:
  int64_t QWidth() const { return int64_t{config_.heads} * config_.head_dim; }
  int64_t KvWidth() const { return int64_t{config_.kv_heads} * config_.head_dim; }
  int64_t QkvWidth() const { return QWidth() + 2 * KvWidth(); }

  Block ReadBlock(WeightReader& reader, int layer, kernels::WeightType store) const {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const std::string attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    Block block;
    block.attention_norm = reader.Vector(prefix + "input_layernorm.weight", config_.hidden);
    block.mlp_norm = reader.Vector(prefix + "post_attention_layernorm.weight", config_.hidden);
    if (config_.qk_norm) {
      block.q_norm = reader.Vector(attention + "q_norm.weight", config_.head_dim);
      block.k_norm = reader.Vector(attention + "k_norm.weight", config_.head_dim);
    }
    block.qkv = reader.Linear(
        {{attention + "q_proj", QWidth()}, {attention + "k_proj", KvWidth()}, {attention + "v_proj", KvWidth()}},
        config_.hidden, config_.qkv_bias, {store, kWideX});
    block.attention_out = reader.Linear({{attention + "o_proj", config_.hidden}}, QWidth(), config_.o_bias, store);
    block.gate_up = reader.Linear({{mlp + "gate_proj", config_.ffn}, {mlp + "up_proj", config_.ffn}}, config_.hidden,
                                  config_.mlp_bias, store);
    block.down = reader.Linear({{mlp + "down_proj", config_.hidden}}, config_.ffn, config_.mlp_bias, store);
    return block;
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

  // One allocation for the activations of the largest batch; Forward() only hands out its parts.
  void AllocateWorkspace(int64_t max_rows) {
    if (max_rows < 1) throw InputError(fmt::format("{} rows in a batch; at least 1 is needed", max_rows));
    constexpr int64_t kLine = 16;  // floats of 64 bytes: every part starts on a cache line
    struct Part {
      float** pointer;
      int64_t width;
    };
    const Part parts[] = {{&normed_, config_.hidden},
                          {&qkv_, QkvWidth()},
                          {&attended_, QWidth()},
                          {&projected_, config_.hidden},
                          {&gate_up_, int64_t{2} * config_.ffn},
                          {&gated_, config_.ffn}};
    int64_t floats = 0;
    for (const Part& part : parts) floats += (part.width * max_rows + kLine - 1) / kLine * kLine;
    workspace_ = ops_.device().Allocate(floats * sizeof(float));
    float* next = workspace_.as<float>();
    for (const Part& part : parts) {
      *part.pointer = next;
      next += (part.width * max_rows + kLine - 1) / kLine * kLine;
    }
  }

  void RmsNorm(const Buffer& weight, const float* x, int64_t rows, float* out) noexcept {
    ops_.RmsNorm(x, config_.hidden, weight.as<float>(), static_cast<float>(config_.rms_eps), rows, config_.hidden, out,
                 config_.hidden);
  }

  // Norms every head of x [rows][heads * head_dim], row stride QkvWidth(), in place: one call per row or per head,
  // whichever are fewer (a row's bits do not depend on which).
  void NormHeads(const Buffer& weight, int heads, int64_t rows, float* x) noexcept {
    const auto eps = static_cast<float>(config_.rms_eps);
    const int64_t width = config_.head_dim, stride = QkvWidth();
    if (rows < heads) {
      for (int64_t row = 0; row < rows; ++row) {
        ops_.RmsNorm(x + row * stride, width, weight.as<float>(), eps, heads, width, x + row * stride, width);
      }
    } else {
      for (int64_t head = 0; head < heads; ++head) {
        ops_.RmsNorm(x + head * width, stride, weight.as<float>(), eps, rows, width, x + head * width, stride);
      }
    }
  }

  // normed_ -> projected_, through the cache.
  void Attend(const Block& block, int layer, int64_t rows, const int64_t* positions, attention::Backend& backend,
              attention::Plan& plan) noexcept {
    block.qkv->Forward(normed_, rows, qkv_, QkvWidth());
    float* q = qkv_;
    float* k = q + QWidth();
    float* v = k + KvWidth();
    if (config_.qk_norm) {
      NormHeads(block.q_norm, config_.heads, rows, q);
      NormHeads(block.k_norm, config_.kv_heads, rows, k);
    }
    ops_.Rope(q, QkvWidth(), rows, config_.heads, config_.head_dim, config_.rotary_dim, rope_table_.as<float>(),
              positions);
    ops_.Rope(k, QkvWidth(), rows, config_.kv_heads, config_.head_dim, config_.rotary_dim, rope_table_.as<float>(),
              positions);
    backend.Append(plan, layer, k, v, QkvWidth());
    backend.Run(plan, layer, q, QkvWidth(), attended_);
    block.attention_out->Forward(attended_, rows, projected_, config_.hidden);
  }

  Ops& ops_;
  std::unique_ptr<Linear> embedding_;
  std::vector<Block> blocks_;
  Buffer final_norm_;
  std::unique_ptr<Linear> lm_head_;  // null: the embedding's weight serves
  Buffer rope_table_;                // f32 [positions][rotary_dim], cos | sin
  Buffer workspace_;
  // Parts of the workspace, each f32 [max_rows][width]:
  float* normed_ = nullptr;     // hidden
  float* qkv_ = nullptr;        // QkvWidth()
  float* attended_ = nullptr;   // QWidth()
  float* projected_ = nullptr;  // hidden
  float* gate_up_ = nullptr;    // 2 ffn
  float* gated_ = nullptr;      // ffn
};

}  // namespace

std::unique_ptr<Model> LoadDecoder(const ModelConfig& config, const Checkpoint& checkpoint, kernels::Ops& ops,
                                   const LoadOptions& options) {
  return std::make_unique<Decoder>(config, checkpoint, ops, options);
}

}  // namespace kvanta::models
