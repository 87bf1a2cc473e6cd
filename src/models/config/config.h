// config.json of a Hugging Face folder, both generations (transformers 4 and 5), validated.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "cache/visibility.h"
#include "kernels/activation.h"
#include "kernels/compression/compressor.h"
#include "kernels/linear_attention/gated_delta_net.h"
#include "kernels/linear_attention/mamba2.h"
#include "kernels/linear_attention/short_conv.h"
#include "kernels/moe/moe_layer.h"
#include "kernels/pointwise.h"
#include "models/config/latent_config.h"
#include "weights/quantization_config.h"

namespace kvanta::weights {
class Checkpoint;
}

namespace kvanta::models {

enum class RopeType : uint8_t { kDefault, kLinear, kLlama3, kYarn, kLongRope, kProportional };

// Rotary position embedding of a layer.
struct RopeSpec {
  int rotary_dim = 0;        // rotated channels of a head, from the first on; 0: no rope
  bool interleaved = false;  // rotates the pairs (2 i, 2 i + 1); else (i, i + rotary_dim / 2)
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  double attention_factor = 0.0;                         // yarn, longrope; 0: from factor (and mscale)
  double mscale = 0.0, mscale_all_dim = 0.0;             // yarn
  bool truncate = true;                                  // yarn
  int64_t original_max_position = 0;                     // before scaling; never 0 once read
  // Divisors of the frequencies [rotary_dim / 2], longrope: for contexts up to the original length, and for longer
  // ones.
  std::vector<float> short_factor = {}, long_factor = {};
  double short_mscale = 0.0, long_mscale = 0.0;  // attention_factor of each, longrope; 0: the same for both
  int rotated_pairs = 0;  // proportional: pairs (i, i + rotary_dim / 2) below it are rotated, the others stay
  bool reversed = false;  // rotates the other way
  // Queries at `position` are multiplied by 1 + beta log(1 + floor(position / original_max_position)).
  double llama_4_scaling_beta = 0.0;

  bool operator==(const RopeSpec&) const = default;
};

struct Mamba2Config {
  kernels::Mamba2Shape shape;
  bool conv_bias = true, in_bias = false, out_bias = false;  // of the convolution and of the projections
  // Factors of the projected z, x, b, c and dt.
  float z_scale = 1, x_scale = 1, b_scale = 1, c_scale = 1, dt_scale = 1;

  bool operator==(const Mamba2Config&) const = default;
};

// Temperature of attention in layers without rope (Llama 4): queries at `position` are multiplied by
// 1 + attn_scale log(1 + floor((position + 1) / floor_scale)).
struct AttentionTemperature {
  int64_t floor_scale = 0;  // 0: none
  double attn_scale = 0;
};

enum class MlpKind : uint8_t {
  kGated,      // down(activation(gate(x)) * up(x))
  kFusedGate,  // the same, whose gate and up the checkpoint has as one matrix, gate_up_proj
  kUngated,    // down(pointwise(up(x)))
};
struct MlpSpec {
  kernels::Activation activation = kernels::Activation::kSilu;      // of a gate
  kernels::Pointwise pointwise = kernels::Pointwise::kSquaredRelu;  // without a gate
  MlpKind kind = MlpKind::kGated;
  bool bias = false;
  float gate_scale = 1;  // of a gate before the activation
};

// Rows of the matrix, or matrices, of queries, keys and values.
enum class QkvLayout : uint8_t {
  kSeparate,      // q_proj, k_proj, v_proj
  kConcatenated,  // one matrix: q of all heads | k | v
  kByKvHead,      // one matrix: of each KV head, q of its heads | k | v
};

// Norms of the hidden states.
enum class NormKind : uint8_t { kRms, kLayer, kLayerWithBias };

// RMS norm of the queries and of the keys, with weights.
enum class QkNorm : uint8_t {
  kNone,
  kPerHead,           // of each head's channels, before RoPE
  kPerHeadAfterRope,  // of each head's channels, after RoPE
  kOwnWeights,        // of each head's channels, with weights of each head, before RoPE
  kAllHeads,          // over the channels of all heads together, before RoPE
};

// Gates that multiply the output of attention, channel by channel or head by head.
enum class OutputGate : uint8_t {
  kNone,
  kAfterQueries,  // q_proj has a head's gates after the head's q
  kOwnMatrix,     // of a matrix of its own (TensorNames::output_gate)
  kPerHead,       // the same, one for all channels of a head
};

// Order of the tensors of all experts, fused_gate_up and fused_down.
enum class ExpertOrder : uint8_t {
  kInOut,    // [experts][in][out]
  kOutIn,    // [experts][out][in]
  kByShape,  // either; [in][out] where both orders fit
};

// Block with a state in place of attention.
enum class RecurrentKind : uint8_t {
  kNone,
  kGatedDeltaNet,
  kKimiDelta,
  kMamba2,
  kShortConv,
  kCompressor,  // in CachedLayers(): inputs of the entries of a layer that are not complete
};

// Selection of the tokens that a layer attends to.
enum class TokenSelection : uint8_t {
  kAll,
  kIndexer,   // those of its own indexer (ModelConfig::indexer)
  kPrevious,  // those of the nearest earlier layer with an indexer
};

// A layer's blocks, as far as they may differ between the layers of a model.
struct LayerSpec {
  RecurrentKind recurrent = RecurrentKind::kNone;
  cache::Visibility visibility;
  RopeSpec rope;
  bool moe = false;         // mixture of experts in place of the MLP
  bool hash_moe = false;    // its experts are those of a table by token
  bool qk_l2_norm = false;  // RMS norm without weights of each head's q and k after RoPE
  // 0 while config.json is read: the model's (FillLayerSpecs).
  int heads = 0, kv_heads = 0, head_dim = 0, intermediate_size = 0;
  float mlp_limit = 0;           // of activations of its MLP or shared experts (Ops::ActivateMul); 0: none
  float expert_limit = 0;        // the same of its routed experts
  bool attention_sinks = false;  // each query head has a sink (attention::AttentionSpec)
  bool k_eq_v = false;           // values are the projected keys, before their norm
  int kv_layer = -1;             // an earlier layer, whose K and V it attends to; -1: its own
  TokenSelection selection = TokenSelection::kAll;
  bool keys_only = false;  // in CachedLayers(): keys of an indexer
  // Tokens of a compressed entry, of layers with a compressor; 1: none. In CachedLayers(): of an entry, or a key.
  int row_tokens = 1;
  int compressed_layer = -1;  // in CachedLayers(): the layer whose entries these are, or the inputs of them
  bool has_mlp = true;        // else attention, or the block in its place, alone
  // Attention has the normed input of that of the layer before, which has no MLP: they are side by side.
  bool shares_input = false;
  // Layers of the checkpoint with its attention and with its MLP, where blocks are counted otherwise; -1: the layer's
  // own number.
  int stored_attention = -1, stored_mlp = -1;
  double attention_scale = 1, mlp_scale = 1;  // multiply what the blocks add to the hidden states

  bool IsRecurrent() const noexcept { return recurrent != RecurrentKind::kNone; }
  void MakeRecurrent(RecurrentKind kind) noexcept {
    recurrent = kind;
    visibility = cache::kRecurrentVisibility;
  }
};

// Names of tensors that differ between architectures.
struct TensorNames {
  struct Decoder {
    std::string_view prefix = "model.";  // embedding, layers.N, final_norm
    std::string_view lm_head = "lm_head";
    std::string_view embedding = "embed_tokens";
    std::string_view layers = "layers";
    bool transposed = false;  // matrices of the layers are stored [in][out] (GPT-2)
  };
  std::vector<Decoder> decoders = {{}};              // alternatives; the first one that the checkpoint has
  std::vector<std::string_view> other_modules = {};  // of other parts, next to a decoder without a prefix: not read
  // Multi-token prediction (MTP): a layer that continues the model's hidden states.
  struct Predictor {
    std::string_view prefix;  // of its modules and of its layers; "": it is the layer after the model's last one
    // Norms of a token's embedding and of the hidden states before it, the projection of both, and the last norm.
    std::string_view embedding_norm, hidden_norm, projection, final_norm;

    explicit operator bool() const noexcept { return !projection.empty(); }
  };
  Predictor predictor = {};  // none: the architecture has no such layer
  // RMS norms of a layer, before and after its two blocks; "" where there is none.
  std::string_view pre_attention_norm = "input_layernorm", post_attention_norm;
  std::string_view pre_mlp_norm = "post_attention_layernorm", post_mlp_norm;
  bool post_mlp_norm_of_experts = false;                       // layers without experts do not have post_mlp_norm
  std::string_view final_norm = "norm";                        // in the decoder
  std::string_view positions;                                  // in the decoder: learned ones
  std::string_view q_norm = "q_norm", k_norm = "k_norm";       // in the attention
  std::string_view qkv = "qkv_proj";                           // in the attention: the matrix of all three
  std::string_view attention_out = "o_proj", sinks = "sinks";  // in the attention
  std::string_view output_gate = "gate_proj";                  // in the attention
  // In latent attention: the projection of queries without q_lora_rank, of latents, their norm, and that of heads from
  // them; factors of queries (MlaConfig::log_query_scales).
  std::string_view latent_q = "q_proj", kv_a = "kv_a_proj_with_mqa", kv_a_norm = "kv_a_layernorm", kv_b = "kv_b_proj";
  std::string_view query_scale = "softmax_scaling.scale", query_bias = "softmax_scaling.bias";
  // Exponents of factors of the rope's frequencies, [rotary_dim / 2]; "": none.
  std::string_view rope_exponents;
  std::string_view attention = "self_attn", mamba2 = "mamba";  // in a layer
  std::string_view mlp = "mlp";                                // in a layer, dense or of experts; "": the layer itself
  std::string_view sparse_mlp;                                 // the same in layers that have it; "": none
  std::string_view router = "gate", shared_expert = "shared_experts", shared_expert_gate = "shared_expert_gate";
  std::string_view correction_bias = "gate.e_score_correction_bias";  // in `mlp`; [experts], or [1][experts]
  bool correction_bias_is_row = false;                                // the latter
  bool correction_bias_is_optional = false;                           // 0 in checkpoints without it
  bool shared_expert_in_layer = false;                                // next to `mlp`; else in it
  bool experts_in_layer = false;  // experts and router are in the layer itself, not in `mlp`
  std::string_view fused_gate_up = "experts.gate_up_proj", fused_down = "experts.down_proj";  // tensors of all experts
  // In an MLP; gate_up if it has one matrix for both.
  std::string_view gate = "gate_proj", up = "up_proj", gate_up = "gate_up_proj", down = "down_proj";
  // The layers' `sparse_mlp` has gate, up and down of all experts in three tensors [experts][out][in].
  bool stacked_experts = false;
  bool interleaved_gate_up = false;  // fused_gate_up has interleaved gate and up; else gate, then up
  ExpertOrder expert_order = ExpertOrder::kInOut;
};

struct ModelConfig {
  std::string architecture;    // e.g. "LlamaForCausalLM"
  std::string model_type;      // e.g. "llama"
  DType dtype = DType::kBf16;  // type of the checkpoint
  bool dtype_known = true;     // false: config.json does not give it, and there are no weights to read it from
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate_size = 0, vocab = 0;
  std::vector<LayerSpec> layer_specs;  // [layers]
  TensorNames names;
  MlpSpec mlp;
  MlaConfig mla;  // with MLA, kv_heads is 1 and head_dim is kv_lora_rank: the cache's shape
  IndexerConfig indexer;
  CompressionConfig compression;
  HyperConnectionConfig hyper_connections;
  kernels::GatedDeltaNetShape gated_delta_net;  // shapes of recurrent layers; also of Kimi Delta Attention
  bool low_rank_gates = true;  // of Kimi Delta Attention: decays and output gates are projected through k_dim channels
  kernels::ShortConvShape short_conv;
  bool short_conv_bias = false;  // of its projections and of the convolution
  Mamba2Config mamba2;
  kernels::MoeConfig moe;
  double router_logit_softcapping = 0;  // of the router's logits, as attn_logit_softcapping; 0: none
  float shared_expert_scale = 1;        // multiplies the output of shared experts
  bool mlp_beside_experts = false;      // layers with experts have the MLP, too
  bool mxfp4_experts = false;           // the checkpoint has the routed experts in MXFP4
  int stored_layers = 0;                // layers of the checkpoint, where blocks are counted otherwise; 0: `layers`
  int num_nextn_predict_layers = 0;     // layers at the checkpoint's end that predict further tokens: LoadPredictor
  // The layer that the predictor's is like; -1: it has the attention of the last one that has any, and the last MLP.
  int predictor_layer = -1;
  NormKind norm = NormKind::kRms;
  double rms_eps = 1e-6;         // epsilon of any kind
  float norm_weight_offset = 0;  // added to the weights of all norms
  bool norm_weights = true;      // false: norms have none
  bool norm_embeddings = false;  // the first layer has the embeddings through an RMS norm without weights
  bool tied_embeddings = false;
  bool has_lm_head = true;               // false: the checkpoint of an embedding model has no output matrix
  bool lm_head_bias = false;             // of the output logits
  int position_offset = 0;               // rows of the learned positions before that of position 0
  double embedding_scale = 1;            // multiplies embeddings
  bool embedding_scale_rounded = false;  // ... after it was rounded to the type of the weights
  double residual_scale = 1;             // multiplies what a block adds to the hidden states
  bool layer_scalars = false;            // the checkpoint has a factor of each layer's hidden states, layer_scalar
  double logits_divisor = 1;             // divides the output logits
  // Per-layer embeddings: channels of a token's input of each layer, from a table of its own; 0: none.
  int hidden_size_per_layer_input = 0;
  int vocab_size_per_layer_input = 0;
  // The checkpoint's; separate matrices, as a GGUF file has, are taken in any case.
  QkvLayout qkv_layout = QkvLayout::kSeparate;
  bool qkv_bias = false, o_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  bool v_norm = false;  // RMS norm without weights of each head's v
  // The MLP has the attention's input, and both outputs are added; the norm is one, or each has its own.
  bool parallel_blocks = false;
  int v_head_dim = 0;  // channels of a head's value, fewer than head_dim, which the cache has zeros after; 0: head_dim
  float value_scale = 1;  // multiplies values
  OutputGate attn_output_gate = OutputGate::kNone;
  kernels::GateFunction attn_gate_function = kernels::GateFunction::kSigmoid;
  AttentionTemperature attn_temperature;
  double softmax_scale = 0;            // multiplies attention logits
  double attn_logit_softcapping = 0;   // 0: none; else cap * tanh(x / cap)
  double final_logit_softcapping = 0;  // the same, of the output logits
  int64_t max_position = 0;            // longest context; with scaled ropes: after scaling
  std::vector<int32_t> eos_token_ids;  // from config.json and generation_config.json
  int32_t bos_token_id = -1;
  weights::QuantizationConfig quantization;  // quantization of the weights
  std::string declared_kv_cache;             // scheme text declared by quantization_config.kv_cache_scheme or
                                             // hf_quant_config.json: "fp8_e4m3", "nvfp4"; "" when none
  // The same for each layer where they differ ("": not quantized), with an empty declared_kv_cache; else empty.
  std::vector<std::string> declared_kv_cache_layers;
  // Reason why a declared cache cannot be had, as an error's text: "auto" throws it. "": none, and the two above hold.
  std::string declared_kv_cache_error;
  std::string kv_cache_note;  // a declaration that "auto" does not follow, for the user; "" without one

  bool UsesMla() const { return mla.kv_lora_rank != 0; }
  // True if tokens attend to later ones: a sequence is computed in one step, and none of it can be reused.
  bool AttendsInBothDirections() const;
  // True if K and V of a token are one row, of which all channels are both.
  bool SharesKv() const { return compression.rotary_dim != 0; }
  // True if sequences have states: some layers are recurrent, or have compressors.
  bool HasStates() const noexcept;
  // The compressor of a layer with row_tokens.
  kernels::CompressorShape Compressor(const LayerSpec& layer) const noexcept;
  // A recurrent layer's state of one sequence; nothing for attention.
  formats::StateShape State(const LayerSpec& layer) const noexcept;
  // Bytes of a token that the states of all recurrent layers advance by: what is kept of a draft token.
  int64_t StateInputBytes() const noexcept;
  // Layers with K and V (or a state) of their own in the cache: the first ones.
  int KvLayers() const;
  std::span<const LayerSpec> LayersWithKv() const {
    return std::span(layer_specs).first(static_cast<size_t>(KvLayers()));
  }
  // Layers of the cache: LayersWithKv(), then, layer by layer, one for the keys of its indexer, and for its compressed
  // entries and the inputs of the next ones.
  std::vector<LayerSpec> CachedLayers() const;
  // Their indices, of each layer of LayersWithKv(); -1: none.
  struct OwnCacheLayers {
    int keys = -1, entries = -1, inputs = -1;
  };
  std::vector<OwnCacheLayers> CacheLayersOf() const;
  // Per layer, in tokens; 0: none.
  std::vector<int> SlidingWindows() const;
};

// Gives layers without sizes of their own the model's.
void FillLayerSpecs(ModelConfig& config);

// Names of Qwen3-Next's predictor.
inline constexpr TensorNames::Predictor kMtpPredictor = {.prefix = "mtp.",
                                                         .embedding_norm = "pre_fc_norm_embedding",
                                                         .hidden_norm = "pre_fc_norm_hidden",
                                                         .projection = "fc",
                                                         .final_norm = "norm"};
// Names of DeepSeek V3's predictor.
inline constexpr TensorNames::Predictor kNextnPredictor = {.prefix = "",
                                                           .embedding_norm = "enorm",
                                                           .hidden_norm = "hnorm",
                                                           .projection = "eh_proj",
                                                           .final_norm = "shared_head.norm"};

// The module of the predictor's tensors, "mtp." or "model.layers.46.".
std::string PredictorModule(const ModelConfig& config, const TensorNames::Decoder& names);

// The predictor of a model with config.names.predictor, as a model of one layer.
ModelConfig ConfigOfPredictor(ModelConfig config);

// The model with layers [first, first + count) alone.
ModelConfig ConfigOfLayers(ModelConfig config, int first, int count);

// The alternative of config.names.decoders whose embeddings or layers the checkpoint has; the first one if it has none.
const TensorNames::Decoder& DecoderNames(const ModelConfig& config, const weights::Checkpoint& checkpoint);

// The module of the embeddings: "embed_tokens", or the output matrix where a checkpoint of tied ones has that alone.
std::string EmbeddingModule(const ModelConfig& config, const TensorNames::Decoder& names,
                            const weights::Checkpoint& checkpoint);

// Reads config.json of a folder and, where they exist, generation_config.json, hf_quant_config.json and
// quant_model_description.json. Weights are not
// needed. `path` may also be the config itself: a JSON file of any name, which is read alone unless it is config.json.
// Throws InputError naming the file, the key, the value and the alternatives.
ModelConfig ReadConfig(const std::string& path);

// The text of a folder's config.json and, where it exists, hf_quant_config.json. Throws InputError.
std::string ReadConfigText(const std::string& folder);

// The text of config.json alone. `dtype_missing` is set when it does not say how the weights are stored.
ModelConfig ParseConfig(std::string_view text, const std::string& name, bool* dtype_missing = nullptr);

// Adds the eos ids of the text of generation_config.json, and its quantized cache as a note.
void AddGenerationConfig(std::string_view text, const std::string& name, ModelConfig& config);

// Adds the declarations in the text of hf_quant_config.json (ModelOpt).
void AddHfQuantConfig(std::string_view text, const std::string& name, ModelConfig& config);

// Adds the cache that the text of quant_model_description.json (msModelSlim) declares.
void AddModelSlimConfig(std::string_view text, const std::string& name, ModelConfig& config);

}  // namespace kvanta::models
