#include "models/weight_count.h"

#include <fmt/format.h>

#include <algorithm>

#include "kvanta/error.h"
#include "weights/weight_blocks.h"

namespace kvanta::models {
namespace {

using weights::CodeType;

int64_t BytesAs(int64_t elements, kernels::WeightType type) noexcept {
  using weights::BlockFormat;
  switch (type) {
    case kernels::WeightType::kInt8:
      return elements * BlockBytes(BlockFormat::kQ8_0) / weights::kBlockWeights;
    case kernels::WeightType::kInt4:
      return elements * BlockBytes(BlockFormat::kQ4_1) / weights::kBlockWeights;
    case kernels::WeightType::kF32:
      return elements * 4;
    case kernels::WeightType::kBf16:
    case kernels::WeightType::kF16:
    case kernels::WeightType::kStored:
      break;
  }
  return elements * 2;
}

struct BlockCount {
  int64_t matrices = 0;
  int64_t vectors = 0;
  int64_t mxfp4 = 0;
  int64_t kept = 0;  // attention: elements of `matrices` that stay as they are where they are quantized
};

BlockCount CountGroupedAttention(const ModelConfig& config, const LayerSpec& spec) {
  const int64_t hidden = config.hidden, q = int64_t{spec.heads} * spec.head_dim;
  const bool has_kv = spec.kv_layer < 0;
  const int64_t kv = has_kv ? int64_t{spec.kv_heads} * spec.head_dim : 0;
  const bool per_head = config.attn_output_gate == OutputGate::kPerHead;
  const int64_t gates = config.attn_output_gate != OutputGate::kNone && !per_head ? q : 0;
  const int64_t v_head_dim = config.v_head_dim == 0 ? spec.head_dim : config.v_head_dim;
  const int64_t values = spec.k_eq_v ? 0 : kv / spec.head_dim * v_head_dim;
  BlockCount count{.matrices = hidden * (q + gates + kv + values + spec.heads * v_head_dim)};
  if (per_head) count.matrices += hidden * spec.heads;
  count.kept = count.matrices;
  if (config.qkv_bias) count.vectors += q + gates + kv + values;
  if (config.o_bias) count.vectors += hidden;
  const bool of_all_heads = config.qk_norm == QkNorm::kAllHeads || config.qk_norm == QkNorm::kOwnWeights;
  if (config.qk_norm != QkNorm::kNone) count.vectors += of_all_heads ? q + kv : int64_t{has_kv ? 2 : 1} * spec.head_dim;
  if (spec.attention_sinks) count.vectors += spec.heads;
  return count;
}

BlockCount CountGatedDeltaNet(const ModelConfig& config) {
  const kernels::GatedDeltaNetShape& shape = config.gated_delta_net;
  const int64_t projected = shape.ConvWidth() + 2 * shape.ValueWidth() + 2 * shape.v_heads;
  BlockCount count{.matrices = config.hidden * projected,
                   .vectors = shape.ConvWidth() * shape.conv_width + 2 * shape.v_heads + shape.v_dim};
  count.kept = count.matrices;
  return count;
}

BlockCount CountKimiDelta(const ModelConfig& config) {
  const kernels::GatedDeltaNetShape& shape = config.gated_delta_net;
  const int64_t width = shape.ValueWidth(), low = 2 * shape.k_dim;  // of the decays and of the gates
  const int64_t gates = config.low_rank_gates ? low * (config.hidden + width) : 2 * config.hidden * width;
  BlockCount count{.matrices = config.hidden * (shape.ConvWidth() + shape.v_heads + width) + gates,
                   .vectors = shape.ConvWidth() * shape.conv_width + shape.v_heads + shape.KeyWidth() + shape.v_dim};
  count.kept = count.matrices;
  return count;
}

BlockCount CountShortConv(const ModelConfig& config) {
  const int64_t hidden = config.hidden, taps = config.short_conv.conv_width;
  BlockCount count{.matrices = 4 * hidden * hidden, .vectors = hidden * taps};
  count.kept = count.matrices;
  if (config.short_conv_bias) count.vectors += 5 * hidden;
  return count;
}

BlockCount CountMamba2(const ModelConfig& config) {
  const kernels::Mamba2Shape& shape = config.mamba2.shape;
  const bool has_norm = shape.gate != kernels::Mamba2Gate::kNoNorm;
  BlockCount count{.matrices = config.hidden * (shape.ProjectedWidth() + shape.Width()),
                   .vectors = shape.ConvWidth() * (shape.conv_width + (config.mamba2.conv_bias ? 1 : 0)) +
                              int64_t{3} * shape.heads + (has_norm ? shape.Width() : 0)};
  count.kept = count.matrices;
  if (config.mamba2.in_bias) count.vectors += shape.ProjectedWidth();
  if (config.mamba2.out_bias) count.vectors += config.hidden;
  return count;
}

BlockCount CountLatentAttention(const ModelConfig& config, const LayerSpec& spec) {
  const MlaConfig& mla = config.mla;
  const int64_t hidden = config.hidden, heads = config.heads, rank = mla.kv_lora_rank, low = mla.q_lora_rank;
  const int64_t q = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), value = heads * mla.v_head_dim;
  const int64_t rope = mla.keeps_rope_channels || spec.rope.rotary_dim != 0 ? mla.qk_rope_head_dim : 0;
  const int64_t nope = q - heads * rope;
  BlockCount count{.matrices = hidden * (rank + rope) + rank * (nope + value) + value * hidden +
                               (low == 0 ? hidden * q : hidden * low + low * q),
                   .vectors = rank + low + (mla.log_query_scales ? 2 * heads : 0)};
  if (config.attn_output_gate == OutputGate::kPerHead) count.matrices += hidden * heads;
  count.kept = count.matrices - rank * (nope + value);  // kv_b_proj is taken apart
  if (config.qkv_bias) count.vectors += low + rank + rope;
  if (config.o_bias) count.vectors += hidden;
  return count;
}

// An indexer's projections; that of the heads' weights and the norm stay as they are stored.
BlockCount CountIndexer(const ModelConfig& config) {
  const int64_t width = int64_t{config.indexer.heads} * config.indexer.head_dim;
  const int64_t in = config.indexer.norms_inputs ? config.hidden : config.mla.q_lora_rank;
  BlockCount count{.matrices = in * width + config.hidden * config.indexer.head_dim};
  count.kept = count.matrices;
  count.vectors = config.hidden * config.indexer.heads + 2 * config.indexer.head_dim;
  if (config.indexer.norms_inputs) count.vectors += 2 * config.hidden;
  if (config.mla.log_query_scales) count.vectors += 2 * config.indexer.heads;
  return count;
}

// The compressor's biases, its norms and the indexer's weights of heads stay as they are stored.
BlockCount CountCompressor(const ModelConfig& config, const LayerSpec& spec) {
  const kernels::CompressorShape shape = config.Compressor(spec);
  BlockCount count{.matrices = config.hidden * shape.InputWidth(),
                   .vectors = shape.KeptTokens() * (shape.entry_dim + shape.key_dim) + shape.entry_dim + shape.key_dim};
  if (shape.key_dim != 0) {
    count.matrices += int64_t{config.mla.q_lora_rank} * config.indexer.heads * shape.key_dim;
    count.vectors += int64_t{config.hidden} * config.indexer.heads;
  }
  return count;
}

BlockCount CountCompressedAttention(const ModelConfig& config, const LayerSpec& spec) {
  const int64_t hidden = config.hidden, low = config.mla.q_lora_rank, width = int64_t{spec.heads} * spec.head_dim;
  const int64_t rank = config.compression.o_lora_rank;
  BlockCount count{.matrices = hidden * low + low * width + hidden * spec.head_dim + width * rank +
                               config.compression.o_groups * rank * hidden,
                   .vectors = low + spec.head_dim + spec.heads};
  if (spec.row_tokens != 1) {
    const BlockCount compressor = CountCompressor(config, spec);
    count.matrices += compressor.matrices;
    count.vectors += compressor.vectors;
  }
  count.kept = count.matrices;
  return count;
}

// Weights of the streams of hidden states: two sets of each layer, and one at the end.
int64_t CountHyperConnections(const ModelConfig& config) {
  const int64_t streams = config.hyper_connections.streams, inputs = streams * config.hidden + 1;
  if (streams == 0) return 0;
  return config.layers * 2 * ((2 + streams) * streams * inputs + 3) + streams * inputs + 1;
}

BlockCount CountMlp(int64_t hidden, int64_t intermediate_size, bool bias, bool gated = true) {
  const int64_t inputs = gated ? 2 : 1;
  return {.matrices = (inputs + 1) * hidden * intermediate_size,
          .vectors = bias ? inputs * intermediate_size + hidden : 0};
}

BlockCount CountMoe(const ModelConfig& config, const LayerSpec& spec) {
  const kernels::MoeConfig& moe = config.moe;
  const int64_t hidden = config.hidden;
  BlockCount count = CountMlp(hidden, moe.shared_expert_intermediate_size,
                              config.mlp.bias && moe.shared_expert_intermediate_size != 0, moe.gated);
  if (moe.shared_expert_gate) count.vectors += hidden;
  const int64_t latent = moe.moe_latent_size;
  count.matrices += 2 * hidden * latent;
  if (latent != 0 && config.mlp.bias) count.vectors += hidden + latent;
  const BlockCount expert = CountMlp(latent != 0 ? latent : hidden, moe.moe_intermediate_size, moe.bias, moe.gated);
  count.matrices += moe.num_experts * expert.matrices;
  if (config.mxfp4_experts) count.mxfp4 = moe.num_experts * expert.matrices;
  const int64_t router = hidden + (moe.has_correction_bias && !spec.hash_moe ? 1 : 0) + (moe.bias ? 1 : 0);
  if (spec.hash_moe) count.vectors += int64_t{config.vocab} * moe.num_experts_per_tok;
  count.vectors += moe.num_experts * (expert.vectors + router);
  if (config.mlp_beside_experts) {
    const BlockCount mlp = CountMlp(hidden, spec.intermediate_size, config.mlp.bias);
    count.matrices += mlp.matrices;
    count.vectors += mlp.vectors + 5 * hidden + moe.num_experts;  // norms and the experts' scales
  }
  return count;
}

// Attention or a recurrent block, and the MLP or the experts.
struct LayerCount {
  BlockCount attention, mlp;
};

BlockCount CountAttention(const ModelConfig& config, const LayerSpec& spec) {
  switch (spec.recurrent) {
    case RecurrentKind::kNone:
    case RecurrentKind::kCompressor:
      break;
    case RecurrentKind::kGatedDeltaNet:
      return CountGatedDeltaNet(config);
    case RecurrentKind::kKimiDelta:
      return CountKimiDelta(config);
    case RecurrentKind::kShortConv:
      return CountShortConv(config);
    case RecurrentKind::kMamba2:
      return CountMamba2(config);
  }
  if (config.SharesKv()) return CountCompressedAttention(config, spec);
  if (!config.UsesMla()) return CountGroupedAttention(config, spec);
  BlockCount count = CountLatentAttention(config, spec);
  if (spec.selection == TokenSelection::kIndexer) {
    const BlockCount indexer = CountIndexer(config);
    count.matrices += indexer.matrices;
    count.kept += indexer.kept;
    count.vectors += indexer.vectors;
  }
  return count;
}

// A matrix of a layer's attention, or of the block in its place, for all of them.
std::string AttentionModule(const ModelConfig& config, const LayerSpec& spec) {
  switch (spec.recurrent) {
    case RecurrentKind::kNone:
    case RecurrentKind::kKimiDelta:
    case RecurrentKind::kCompressor:
      break;
    case RecurrentKind::kGatedDeltaNet:
      return "linear_attn.out_proj";
    case RecurrentKind::kShortConv:
      return "conv.out_proj";
    case RecurrentKind::kMamba2:
      return fmt::format("{}.out_proj", config.names.mamba2);
  }
  return fmt::format("{}.{}", config.names.attention, config.names.attention_out);
}

LayerCount CountLayer(const ModelConfig& config, const LayerSpec& spec) {
  if (!spec.has_mlp) return {.attention = CountAttention(config, spec), .mlp = {}};
  return {.attention = CountAttention(config, spec),
          .mlp = spec.moe ? CountMoe(config, spec)
                          : CountMlp(config.hidden, spec.intermediate_size, config.mlp.bias,
                                     config.mlp.kind != MlpKind::kUngated)};
}

// The table and the layers' gates and projections.
BlockCount CountPerLayerInputs(const ModelConfig& config) {
  const int64_t width = config.hidden_size_per_layer_input, hidden = config.hidden;
  if (width == 0) return {};
  return {.matrices = 3 * config.layers * width * hidden, .vectors = config.layers * hidden + width};
}

int64_t CountPositions(const ModelConfig& config) {
  if (config.names.positions.empty()) return 0;
  return (config.position_offset + config.max_position) * config.hidden;
}

int64_t CountXielu(const ModelConfig& config) {
  return config.mlp.kind == MlpKind::kUngated && config.mlp.pointwise == kernels::Pointwise::kXielu ? 2 * config.layers
                                                                                                    : 0;
}

// Elements of the layers' matrices that a checkpoint has quantized, in formats that kernels read. The attention and the
// MLP of a layer are taken as a whole.
int64_t CountQuantized(const ModelConfig& config, const std::vector<LayerCount>& layers) {
  const weights::QuantizationConfig& quantization = config.quantization;
  const bool has_codes =
      quantization.method != weights::QuantMethod::kNone && quantization.method != weights::QuantMethod::kMxfp4;
  const bool is_kept = has_codes && quantization.format.codes != CodeType::kNone &&
                       QuantizedStepBytes(quantization.format, config.hidden) != 0;
  if (!is_kept) return 0;
  int64_t count = 0;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const LayerSpec& spec = config.layer_specs[layer];
    const auto is_quantized = [&](int stored, std::string_view module) {
      const TensorNames::Decoder& names = config.names.decoders.front();
      return !quantization.IsIgnored(
          fmt::format("{}{}.{}.{}", names.prefix, names.layers, stored < 0 ? static_cast<int>(layer) : stored, module));
    };
    const bool sparse = spec.moe && !config.names.sparse_mlp.empty();
    const bool in_layer = spec.moe && config.names.experts_in_layer;
    const std::string_view own = in_layer ? "" : sparse ? config.names.sparse_mlp : config.names.mlp;
    const std::string mlp =
        fmt::format("{}{}{}{}", own, own.empty() ? "" : ".", spec.moe ? "experts.0." : "", config.names.down);
    if (is_quantized(spec.stored_attention, AttentionModule(config, spec))) count += layers[layer].attention.kept;
    if (is_quantized(spec.stored_mlp, mlp)) count += layers[layer].mlp.matrices;
  }
  return count;
}

}  // namespace

WeightCount CountWeights(const ModelConfig& config) {
  const int64_t hidden = config.hidden;
  constexpr int64_t kMax = int64_t{1} << 50;
  const BlockCount inputs = CountPerLayerInputs(config);
  std::vector<LayerCount> layers;
  int64_t matrices = inputs.matrices, mxfp4 = 0, vectors = inputs.vectors;
  for (const LayerSpec& spec : config.layer_specs) {
    const LayerCount& layer = layers.emplace_back(CountLayer(config, spec));
    for (const BlockCount& block : {layer.attention, layer.mlp}) {
      if (block.matrices > kMax || matrices > kMax - block.matrices) {
        throw InputError(fmt::format("config.json describes {} layers of {} weights, more than any machine holds",
                                     config.layers, layer.attention.matrices + layer.mlp.matrices));
      }
      matrices += block.matrices;
      mxfp4 += block.mxfp4;
      vectors += block.vectors;
    }
  }
  int64_t norms = 0;
  const auto count_norm = [&](std::string_view name) { norms += name.empty() ? 0 : 1; };
  for (const LayerSpec& spec : config.layer_specs) {
    if (!spec.shares_input) count_norm(config.names.pre_attention_norm);
    count_norm(config.names.post_attention_norm);
    if (!spec.has_mlp) continue;
    count_norm(config.names.pre_mlp_norm);
    if (spec.moe || !config.names.post_mlp_norm_of_experts) count_norm(config.names.post_mlp_norm);
  }
  const weights::QuantizedFormat& format = config.quantization.format;
  constexpr int64_t kStep = 16 * 128;  // weights of QuantizedStepBytes()
  const int64_t per_layer_table =
      int64_t{config.vocab_size_per_layer_input} * config.layers * config.hidden_size_per_layer_input;
  return {
      .matrices = matrices,
      .mxfp4 = mxfp4,
      .quantized = CountQuantized(config, layers),
      .quantized_bits = static_cast<double>(8 * QuantizedStepBytes(format, config.hidden)) / kStep,
      .embeddings =
          int64_t{config.vocab} * hidden * (config.tied_embeddings || !config.has_lm_head ? 1 : 2) + per_layer_table,
      .vectors = vectors +
                 (config.norm_weights ? norms + 1 : 0) * hidden * (config.norm == NormKind::kLayerWithBias ? 2 : 1) +
                 (config.layer_scalars ? config.layers : 0) + (config.lm_head_bias ? config.vocab : 0) +
                 CountPositions(config) + CountXielu(config) + CountHyperConnections(config)};
}

int64_t WeightCount::Bytes(kernels::WeightType store, bool keep_quantized) const noexcept {
  constexpr int64_t kVectorBytes = SizeOf(DType::kF32);
  const int64_t blocks = keep_quantized ? mxfp4 : 0, codes = keep_quantized ? quantized : 0;
  return blocks / BlockWeights(weights::BlockFormat::kMXFP4) * BlockBytes(weights::BlockFormat::kMXFP4) +
         static_cast<int64_t>(static_cast<double>(codes) * quantized_bits / 8) +
         BytesAs(matrices - blocks - codes, store) + BytesAs(embeddings, EmbeddingType(store)) + vectors * kVectorBytes;
}

}  // namespace kvanta::models
