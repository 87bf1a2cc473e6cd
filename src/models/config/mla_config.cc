#include "models/config/mla_config.h"

#include <fmt/format.h>

#include <cmath>

#include "formats/scheme.h"

namespace kvanta::models {
namespace {

constexpr int64_t kMaxDim = 1024;  // a head's nope, rope and value channels
constexpr int64_t kMaxProjection = int64_t{1} << 20;

}  // namespace

void ReadMla(const JsonObject& json, ModelConfig& config) {
  MlaConfig& mla = config.mla;
  mla.kv_lora_rank = static_cast<int>(json.Int("kv_lora_rank", 8, formats::kMaxLatentRank));
  if (mla.kv_lora_rank % 8 != 0) json.Fail("kv_lora_rank", "a multiple of 8");
  mla.q_lora_rank = static_cast<int>(json.Int("q_lora_rank", 1, kMaxProjection, 0));
  mla.qk_nope_head_dim = static_cast<int>(json.Int("qk_nope_head_dim", 1, kMaxDim));
  mla.qk_rope_head_dim = static_cast<int>(json.Int("qk_rope_head_dim", 2, formats::kMaxRopeDim));
  if (mla.qk_rope_head_dim % 2 != 0) json.Fail("qk_rope_head_dim", "an even number");
  mla.v_head_dim = static_cast<int>(json.Int("v_head_dim", 1, kMaxDim));
  config.kv_heads = 1;
  config.head_dim = mla.kv_lora_rank;
  for (LayerSpec& layer : config.layer_specs) layer.rope.rotary_dim = mla.qk_rope_head_dim;
  // transformers: with YaRN, mscale_all_dim scales the softmax.
  const RopeSpec& rope = config.layer_specs.front().rope;
  if (rope.type == RopeType::kLongRope) json.Fail("rope_scaling", "a rope_type other than longrope");
  const double mscale = rope.type == RopeType::kYarn && rope.mscale_all_dim != 0 && rope.factor > 1
                            ? 0.1 * rope.mscale_all_dim * std::log(rope.factor) + 1.0
                            : 1.0;
  config.softmax_scale = mscale * mscale / std::sqrt(static_cast<double>(mla.qk_nope_head_dim + mla.qk_rope_head_dim));
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
}

void ReadIndexer(const JsonObject& json, ModelConfig& config) {
  constexpr int64_t kMaxTopk = 1 << 16, kMaxIndexHeads = 1024;
  IndexerConfig& indexer = config.indexer;
  if (config.mla.q_lora_rank == 0 && !indexer.norms_inputs)
    json.Fail("q_lora_rank", "a rank: an indexer's queries are projected from there");
  indexer.topk = static_cast<int>(json.Int("index_topk", 1, kMaxTopk));
  indexer.heads = static_cast<int>(json.Int("index_n_heads", 1, kMaxIndexHeads));
  indexer.head_dim = static_cast<int>(json.Int("index_head_dim", 8, formats::kMaxLatentRank));
  if (indexer.head_dim % 8 != 0 || indexer.head_dim < config.mla.qk_rope_head_dim) {
    json.Fail("index_head_dim",
              fmt::format("a multiple of 8, at least qk_rope_head_dim ({})", config.mla.qk_rope_head_dim));
  }
  for (LayerSpec& layer : config.layer_specs) layer.selection = TokenSelection::kIndexer;
}

}  // namespace kvanta::models
