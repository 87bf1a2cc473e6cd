#include "models/decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvanta/error.h"
#include "models/blocks/decoder_layer.h"
#include "models/blocks/embedding_scale.h"
#include "models/blocks/hyper_connections.h"
#include "models/blocks/per_layer_inputs.h"
#include "models/blocks/position_embedding.h"
#include "models/blocks/predictor_input.h"
#include "models/rope_tables.h"
#include "models/weight_count.h"
#include "models/weights.h"

namespace kvanta::models {
namespace {

using kernels::Linear;
using kernels::Ops;

class Decoder final : public Model {
 public:
  Decoder(const ModelConfig& config, const weights::Checkpoint& checkpoint, Ops& ops, const LoadOptions& options)
      : ops_(ops),
        target_(options.predicts_for),
        ranks_(options.ranks == nullptr ? alone_ : *options.ranks),
        vocab_(ranks_.PartitionOf(config.vocab)) {
    const LayerRange own = options.layers.value_or(LayerRange{.first = 0, .count = config.layers});
    config_ = ConfigOfLayers(config, own.first, own.count);
    is_first_ = own.first == 0;
    is_last_ = own.End() == config.layers;
    WeightReader reader(checkpoint, ops, options.keep_types, config.quantization, options.keep_quantized, &ranks_);
    const TensorNames::Decoder names = DecoderNames(config, checkpoint);
    const std::string prefix(names.prefix), head(names.lm_head), embedding = prefix + std::string(names.embedding);
    const kernels::LinearKind embedding_kind{EmbeddingType(options.store), kInt16Activations};
    // The largest matrices first: while one is packed, it is in memory twice.
    if (is_first_ && target_ == nullptr) {
      const std::string embeddings = EmbeddingModule(config, names, checkpoint);
      embedding_ = reader.Linear({{embeddings, config.vocab}}, config.hidden, false, embedding_kind);
      if (!config.tied_embeddings && config.has_lm_head) {
        lm_head_ = reader.Linear({{head, config.vocab}}, config.hidden, config.lm_head_bias, embedding_kind);
      }
      if (!config.names.positions.empty()) positions_ = PositionEmbedding(reader, ops, config, prefix);
      if (config.norm_embeddings) embedding_norm_ = Norm(reader, config, "", config.hidden);
      embedding_scale_ = EmbeddingScale(config, config.embedding_scale, options.store);
    } else {
      reader.SkipTensors(embedding + ".");
      reader.SkipTensors(head + ".");
      if (!config.names.positions.empty()) reader.SkipTensors(fmt::format("{}{}.", prefix, config.names.positions));
    }
    reader.SetTransposed(names.transposed);
    const BlockSource source{.reader = reader,
                             .ops = ops,
                             .config = config_,
                             .store = options.store,
                             .ranks = ranks_,
                             .expert_parallel = options.expert_parallel,
                             .max_draft_rows = options.max_draft_rows};
    const std::string predictor = target_ == nullptr ? "" : PredictorModule(config, names);
    if (target_ != nullptr) predictor_input_ = std::make_unique<PredictorInput>(source, predictor);
    if (config_.hyper_connections.streams != 0) streams_.emplace(source, prefix);
    if (config.hidden_size_per_layer_input != 0) {
      const auto width = static_cast<double>(config.hidden_size_per_layer_input);
      per_layer_ = std::make_unique<PerLayerInputs>(source, prefix, embedding_kind,
                                                    EmbeddingScale(config, std::sqrt(width), options.store));
    }
    for (int layer = 0; layer < config.layers; ++layer) {
      const LayerSpec& spec = config.layer_specs[layer];
      const auto name_of = [&](int stored) {
        return fmt::format("{}{}.{}.", prefix, names.layers, stored < 0 ? layer : stored);
      };
      const std::string name = name_of(spec.stored_attention), mlp = name_of(spec.stored_mlp);
      if (layer < own.first || layer >= own.End()) {
        reader.SkipTensors(name);
        reader.SkipTensors(mlp);
      } else {
        layers_.push_back(ReadDecoderLayer(source, spec, name, mlp));
        if (per_layer_) per_layer_->ReadLayer(source, name);
        if (streams_) streams_->ReadLayer(source, name);
      }
    }
    if (is_last_) {  // dividing its output divides the logits
      const std::string norm = target_ == nullptr ? fmt::format("{}{}", prefix, config.names.final_norm)
                                                  : fmt::format("{}{}", predictor, config.names.predictor.final_norm);
      final_norm_ = Norm(reader, config, norm, config.hidden, 0, 1 / config.logits_divisor);
    } else {
      reader.SkipTensors(fmt::format("{}{}.", prefix, config.names.final_norm));
    }
    std::vector<float> rope_exponents;
    if (!config.names.rope_exponents.empty()) {
      rope_exponents = reader.KeptValues(std::string(config.names.rope_exponents), config.mla.qk_rope_head_dim / 2);
    }
    for (const std::string_view other : config.names.other_modules) reader.SkipTensors(fmt::format("{}.", other));
    if (target_ == nullptr) {
      reader.CheckUnusedTensors(names, config.stored_layers == 0 ? config.layers : config.stored_layers,
                                config.num_nextn_predict_layers);
    }
    weight_bytes_ = reader.Bytes();
    if (config_.HasStates()) max_draft_rows_ = options.max_draft_rows;
    ropes_.emplace(ops, config_, options.max_positions == 0 ? config.max_position : options.max_positions,
                   rope_exponents);
    AllocateScratch(options.max_rows);
  }

  Ops& ops() const noexcept override { return ops_; }

  std::vector<attention::AttentionSpec> AttentionLayers() const override {
    std::vector<attention::AttentionSpec> layers;
    for (size_t i = 0; i < static_cast<size_t>(config_.KvLayers()); ++i) {
      const LayerSpec& spec = config_.layer_specs[i];
      if (spec.IsRecurrent()) {
        layers.push_back({.visibility = spec.visibility});
        continue;
      }
      layers.push_back({.heads = spec.heads / ranks_.Size(),
                        .kv_heads = config_.UsesMla() ? spec.kv_heads : ranks_.OwnKvHeads(spec.kv_heads).count,
                        .head_dim = spec.head_dim,
                        .rope_dim = config_.mla.qk_rope_head_dim,
                        .index_topk = spec.selection == TokenSelection::kAll ? 0 : config_.indexer.topk,
                        .softmax_scale = static_cast<float>(config_.softmax_scale),
                        .softcap = static_cast<float>(config_.attn_logit_softcapping),
                        .visibility = spec.visibility,
                        .sinks = layers_[i].attention->Sinks()});
    }
    const std::vector<LayerSpec> cached = config_.CachedLayers();
    for (size_t i = layers.size(); i < cached.size(); ++i) {
      const LayerSpec& spec = cached[i];
      if (spec.IsRecurrent()) {
        layers.push_back({.visibility = spec.visibility});
        continue;
      }
      if (!spec.keys_only) {  // entries
        layers[static_cast<size_t>(spec.compressed_layer)].entries_layer = static_cast<int>(i);
        layers.push_back({.heads = 1, .kv_heads = 1, .head_dim = spec.head_dim, .softmax_scale = 1});
        continue;
      }
      layers.push_back({.heads = config_.indexer.heads,
                        .kv_heads = 1,
                        .head_dim = config_.indexer.head_dim,
                        .index_topk = config_.indexer.topk,
                        .softmax_scale = 1});
    }
    return layers;
  }

  void Forward(const ForwardBatch& batch, attention::Backend& backend, attention::Plan& plan,
               float* hidden) noexcept override {
    auto rows = static_cast<int64_t>(batch.tokens.size());
    if (target_ != nullptr) {
      target_->Embed(batch.tokens, normed_);
      predictor_input_->Forward(normed_, rows, hidden);
    } else if (is_first_) {
      Embed(batch.tokens, hidden);
    }
    if (positions_) positions_.Add(ops_, batch.positions, block_out_, hidden);
    if (embedding_norm_) embedding_norm_.Forward(ops_, hidden, config_.hidden, rows, hidden, config_.hidden);
    if (per_layer_) per_layer_->Prepare(batch.tokens, hidden);
    AttentionStep step{.index_layer = config_.KvLayers() - 1,
                       .rows = rows,
                       .positions = batch.positions.data(),
                       .backend = &backend,
                       .plan = &plan};
    if (streams_) {
      streams_->Forward(layers_, *ropes_, step, batch.tokens.data(), {normed_, block_out_}, hidden);
      step.layer = config_.layers;
    }
    for (; step.layer < config_.layers; ++step.layer) {
      DecoderLayer& layer = layers_[step.layer];
      ropes_->Set(config_, step);
      const LayerSpec& spec = config_.layer_specs[step.layer];
      if (spec.selection == TokenSelection::kIndexer) ++step.index_layer;
      const float* x = normed_;
      if (!spec.shares_input) x = Normed(layer.pre_attention_norm, hidden, rows, layer.attention->Reader());
      Settle(hidden, rows);
      layer.attention->Forward(step, x, block_out_);
      if (config_.parallel_blocks && layer.pre_mlp_norm) Normed(layer.pre_mlp_norm, hidden, rows, nullptr);
      AddResidual(layer.post_attention_norm, spec.attention_scale, rows);
      if (batch.output_rows && batch.all_hidden == nullptr && step.layer + 1 == config_.layers) {
        Settle(hidden, rows);
        if (config_.parallel_blocks) SelectOutputRows(*batch.output_rows, normed_);
        rows = SelectOutputRows(*batch.output_rows, hidden);
        if (per_layer_) per_layer_->SelectOutputRows(*batch.output_rows);
      }
      if (rows == 0) return;
      if (layer.mlp) {
        x = config_.parallel_blocks ? normed_ : Normed(layer.pre_mlp_norm, hidden, rows, layer.mlp->Reader());
        Settle(hidden, rows);
        layer.mlp->Forward(x, rows, block_out_);
        AddResidual(layer.post_mlp_norm, spec.mlp_scale, rows);
      }
      if (per_layer_) {
        Settle(hidden, rows);
        per_layer_->Forward(step.layer, hidden, rows, block_out_);
        AddResidual(layer.post_per_layer_input_norm, 1, rows);
      }
      if (layer.scalar == 1) continue;
      Settle(hidden, rows);
      ops_.Scale(hidden, layer.scalar, rows * config_.hidden);
    }
    if (is_last_) final_norm_.AddAndForward(ops_, hidden, std::exchange(residual_, nullptr), rows, hidden, nullptr);
    Settle(hidden, rows);
    if (batch.all_hidden == nullptr && !streams_) return;
    if (batch.all_hidden != nullptr) {
      ops_.Copy(hidden, config_.hidden, rows, config_.hidden, batch.all_hidden, config_.hidden);
    }
    if (batch.output_rows) SelectOutputRows(*batch.output_rows, hidden);
  }

  void AdvanceStates(attention::Backend& backend, attention::Plan& plan) noexcept override {
    AttentionStep step{.backend = &backend, .plan = &plan};
    for (; step.layer < config_.layers; ++step.layer) layers_[step.layer].attention->AdvanceStates(step);
  }

  void Logits(const float* hidden, int64_t rows, float* out, kernels::RowArgmax* argmaxes) noexcept override {
    if (target_ != nullptr) return target_->Logits(hidden, rows, out, argmaxes);
    const Linear& head = lm_head_ ? *lm_head_ : *embedding_;
    const auto softcap = static_cast<float>(config_.final_logit_softcapping);
    const bool is_whole = ranks_.IsSingleRank();
    // Rank 0 computes its columns in their place, the others side by side, to be sent.
    const int64_t stride = ranks_.Rank() == 0 ? config_.vocab : head.Out();
    head.Forward(hidden, rows, out, stride, is_whole && softcap == 0 ? argmaxes : nullptr);
    if (!is_whole) {
      ranks_.GatherColumns(out, rows, vocab_, out);
      if (ranks_.Rank() != 0) return;
    }
    if (softcap != 0 || (!is_whole && argmaxes != nullptr)) {
      ops_.Softcap(out, rows, config_.vocab, softcap, argmaxes);
    }
  }

  void Embed(std::span<const int32_t> tokens, float* hidden) noexcept override {
    EmbedTokens(tokens, hidden);
    if (embedding_scale_ != 1) ops_.Scale(hidden, embedding_scale_, std::ssize(tokens) * config_.hidden);
  }

 private:
  // Embeddings of all tokens, each from the rank that has its row: ranks gather those of all rows, of as many tokens at
  // once as there is room for, and keep the ones that are filled. So it is a fixed number of launches on a GPU.
  void EmbedTokens(std::span<const int32_t> tokens, float* hidden) noexcept {
    const auto rows = static_cast<int64_t>(tokens.size());
    const int64_t width = config_.hidden;
    if (ranks_.IsSingleRank()) return ops_.Embed(*embedding_, 0, tokens.data(), rows, hidden);
    const parallel::Partition embeddings = ranks_.PartitionOf(ranks_.Size() * width);
    for (int64_t first = 0; first < rows; first += max_embedded_rows_) {
      const int64_t count = std::min(max_embedded_rows_, rows - first);
      const int32_t* ids = tokens.data() + first;
      ops_.Embed(*embedding_, vocab_.Begin(ranks_.Rank()), ids, count, block_out_);
      ranks_.AllGatherColumns(block_out_, count, embeddings, normed_);
      ops_.PickParts(normed_, vocab_, ids, count, width, hidden + first * width);
    }
  }

  // Moves the rows to the front of `x` and returns their number. block_out_ is overwritten.
  int64_t SelectOutputRows(std::span<const int64_t> rows, float* x) noexcept {
    const auto count = static_cast<int64_t>(rows.size());
    ops_.Gather(x, config_.hidden, rows.data(), count, block_out_);
    ops_.Copy(block_out_, config_.hidden, count, config_.hidden, x, config_.hidden);
    return count;
  }

  // One allocation for the activations of the largest batch. Blocks run one after the other, in the same memory.
  void AllocateScratch(int64_t max_rows) {
    if (max_rows < 1) throw InputError(fmt::format("{} rows in a batch; at least 1 is needed", max_rows));
    max_embedded_rows_ = std::max<int64_t>(1, max_rows / ranks_.Size());
    const int64_t floats = Place(nullptr, max_rows);
    scratch_ = ops_.device().Allocate(floats * sizeof(float));
    Place(scratch_.as<float>(), max_rows);
  }

  // Returns the number of floats.
  int64_t Place(float* memory, int64_t rows) noexcept {
    Scratch shared(memory);
    normed_ = shared.Take(std::max<int64_t>(rows, ranks_.Size()) * config_.hidden);
    block_out_ = shared.Take(rows * config_.hidden);
    if (per_layer_) {
      per_layer_->PlaceInputs(shared, rows);
      shared.OverlapScratch(*per_layer_, rows);
    }
    if (streams_) streams_->Place(shared, rows);
    if (predictor_input_) shared.OverlapScratch(*predictor_input_, rows);
    for (DecoderLayer& layer : layers_) {
      shared.OverlapScratch(*layer.attention, rows);
      if (layer.mlp) shared.OverlapScratch(*layer.mlp, rows);
    }
    return shared.Used();
  }

  // Adds the residual that AddResidual left.
  void Settle(float* hidden, int64_t rows) noexcept {
    if (residual_ != nullptr) ops_.Add(hidden, std::exchange(residual_, nullptr), rows * config_.hidden);
  }

  // Normed hidden states with the residual; the hidden states themselves without a norm.
  const float* Normed(const Norm& norm, float* hidden, int64_t rows, const Linear* reader) noexcept {
    if (!norm) return hidden;
    norm.AddAndForward(ops_, hidden, std::exchange(residual_, nullptr), rows, normed_, reader);
    return normed_;
  }

  // hidden += block_out_, through a norm if there is one, and scaled: left to the next norm or Settle.
  void AddResidual(const Norm& norm, double factor, int64_t rows) noexcept {
    if (norm) norm.Forward(ops_, block_out_, config_.hidden, rows, block_out_, config_.hidden);
    const auto scale = static_cast<float>(config_.residual_scale * factor);
    if (scale != 1) ops_.Scale(block_out_, scale, rows * config_.hidden);
    residual_ = block_out_;
  }

  Ops& ops_;
  Model* target_;  // the model that a predictor continues; null: this is no predictor
  parallel::Communicator alone_;
  parallel::Communicator& ranks_;
  parallel::Partition vocab_;
  bool is_first_ = true, is_last_ = true;  // this rank's place in a pipeline
  std::unique_ptr<Linear> embedding_;      // the first rank has it
  std::vector<DecoderLayer> layers_;
  Norm final_norm_;
  std::unique_ptr<Linear> lm_head_;  // null: tied to the embedding, or there is none
  PositionEmbedding positions_;      // none where positions are rotations; the first rank has it
  Norm embedding_norm_;              // none; the first rank has it
  float embedding_scale_ = 1;
  std::optional<RopeTables> ropes_;
  std::unique_ptr<PerLayerInputs> per_layer_;        // null: none
  std::unique_ptr<PredictorInput> predictor_input_;  // with target_
  std::optional<HyperStreams> streams_;              // null: hidden states are one stream
  int64_t max_embedded_rows_ = 0;                    // tokens of which normed_ holds the embeddings of all ranks
  Buffer scratch_;
  // Parts of scratch_, each f32 [max_rows][hidden]:
  float* normed_ = nullptr;
  float* block_out_ = nullptr;       // output of a block
  const float* residual_ = nullptr;  // block_out_ while it is to be added to the hidden states
};

}  // namespace

std::unique_ptr<Model> LoadDecoder(const ModelConfig& config, const weights::Checkpoint& checkpoint, kernels::Ops& ops,
                                   const LoadOptions& options) {
  if (!config.names.stacked_experts) return std::make_unique<Decoder>(config, checkpoint, ops, options);
  const weights::Checkpoint split = checkpoint.SplitExperts(config.names.sparse_mlp, config.moe.num_experts);
  return std::make_unique<Decoder>(config, split, ops, options);
}

}  // namespace kvanta::models
