// DeepSeek V4: keys and values in one row per token, read within a window and as compressed entries of the tokens
// before, which some layers choose by an indexer; hyper-connections; experts by scores sqrt(softplus), or in the first
// layers by token. transformers: models/deepseek_v4/modeling_deepseek_v4.py and configuration_deepseek_v4.py.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"
#include "kernels/hyper_connections/hyper_connections.h"
#include "models/architecture.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

// Kinds of layers, by the entries that they read in addition to their window.
enum class Entries : uint8_t { kNone, kChosen, kAll };
constexpr std::string_view kWindowed = "sliding_attention", kSparse = "compressed_sparse_attention",
                           kHeavy = "heavily_compressed_attention";

void RenameV4Keys(Json& keys) {
  RenameKey(keys, "moe_intermediate_size", "intermediate_size");
}

void ReadSharedKv(const JsonObject& json, ModelConfig& config) {
  if (config.kv_heads != 1) json.Fail("num_key_value_heads", "1");
  if (config.head_dim > formats::kMaxLatentRank) {
    json.Fail("head_dim", fmt::format("at most {}", formats::kMaxLatentRank));
  }
  config.mla.kv_lora_rank = config.head_dim;  // the cache's formats are those of latents
  config.mla.q_lora_rank = static_cast<int>(json.Int("q_lora_rank", 1, 1 << 20));
  CompressionConfig& compression = config.compression;
  compression.o_groups = static_cast<int>(json.Int("o_groups", 1, config.heads));
  compression.o_lora_rank = static_cast<int>(json.Int("o_lora_rank", 1, 1 << 20));
  if (config.heads % compression.o_groups != 0) {
    json.Fail("o_groups", fmt::format("a divisor of num_attention_heads ({})", config.heads));
  }
  const cache::Visibility window = cache::SlidingWindow(static_cast<int>(json.Int("sliding_window", 1, kMaxPositions)));
  for (LayerSpec& layer : config.layer_specs) {
    layer.visibility = window;
    layer.attention_sinks = true;
  }
}

// Tokens of an entry: a key of its own, or one in compress_rates.
int ReadRate(const JsonObject& json, const char* own_key, std::string_view type, int missing) {
  constexpr const char* kRates = "compress_rates";
  constexpr int kMaxRate = 4096;
  if (json.Has(own_key)) return static_cast<int>(json.Int(own_key, 2, kMaxRate));
  return json.Has(kRates) ? static_cast<int>(json.Object(kRates).Int(type, 2, kMaxRate, missing)) : missing;
}

// From layer_types, or compress_ratios; by default two layers of long entries and then both kinds in turn.
std::vector<Entries> ReadKinds(const JsonObject& json, int layers) {
  constexpr const char *kTypes = "layer_types", *kRatios = "compress_ratios";
  std::vector<Entries> kinds;
  if (!json.Has(kTypes) && !json.Has(kRatios)) {
    for (int layer = 0; layer < layers; ++layer) {
      kinds.push_back(layer < 2 || layer % 2 == 0 ? Entries::kAll : Entries::kChosen);
    }
    return kinds;
  }
  const char* key = json.Has(kTypes) ? kTypes : kRatios;
  const auto fail = [&] {
    json.Fail(key, key == kTypes ? fmt::format("{}, {} or {} for each of {} layers", kWindowed, kSparse, kHeavy, layers)
                                 : fmt::format("0, 4 or 128 for each of {} layers", layers));
  };
  const Json& list = json.Get(key);
  // Published lists have layers that predict further tokens, too.
  if (!list.is_array() || list.size() < static_cast<size_t>(layers)) fail();
  for (size_t layer = 0; layer < static_cast<size_t>(layers); ++layer) {
    const Json& kind = list[layer];
    if (kind == kWindowed || kind == 0) {
      kinds.push_back(Entries::kNone);
    } else if (kind == kSparse || kind == 4) {
      kinds.push_back(Entries::kChosen);
    } else if (kind == kHeavy || kind == 128) {
      kinds.push_back(Entries::kAll);
    } else {
      fail();
    }
  }
  return kinds;
}

// Indexer of layers that choose entries.
void ReadEntryIndexer(const JsonObject& json, ModelConfig& config) {
  IndexerConfig& indexer = config.indexer;
  indexer.topk = static_cast<int>(json.Int("index_topk", 1, 1 << 16));
  indexer.heads = static_cast<int>(json.Int("index_n_heads", 1, 1024));
  indexer.head_dim = static_cast<int>(json.Int("index_head_dim", 8, formats::kMaxLatentRank));
  indexer.rope_interleave = true;
  if (indexer.head_dim % 8 != 0 || indexer.head_dim < config.compression.rotary_dim) {
    json.Fail("index_head_dim", fmt::format("a multiple of 8, at least the {} rotated channels of a head",
                                            config.compression.rotary_dim));
  }
}

// Both ropes: of layers with a window alone, and of those with entries, which alone may be scaled. rope_parameters has
// them as `main` and `compress`; or it, or rope_scaling, is the scaling of the latter.
void ReadV4Ropes(const JsonObject& json, const std::vector<Entries>& kinds, ModelConfig& config) {
  constexpr const char *kParameters = "rope_parameters", *kScaling = "rope_scaling",
                       *kPartial = "partial_rotary_factor";
  constexpr const char *kMain = "main", *kCompress = "compress", *kFactor = "attention_factor";
  config.max_position = ReadMaxPosition(json);  // scaling is included
  double partial = 64.0 / 512;
  if (json.Has(kPartial)) {
    partial = json.Number(kPartial, 0, 1);
  } else if (json.Has("qk_rope_head_dim")) {
    partial = static_cast<double>(json.Int("qk_rope_head_dim", 2, config.head_dim)) / config.head_dim;
  }
  const char* key = json.Has(kParameters) ? kParameters : kScaling;
  const Json none = Json::object();
  const JsonObject given = json.Has(key) ? json.Object(key) : JsonObject(none, json.File());
  const auto read = [&](const JsonObject& rope, double theta) {
    RopeSpec spec = ReadRopeParameters(rope, config.head_dim, config.max_position, theta, partial);
    spec.interleaved = true;
    if (spec.type != RopeType::kDefault && spec.type != RopeType::kYarn) rope.Fail("rope_type", "default or yarn");
    return spec;
  };
  const double theta = ReadTheta(json, "rope_theta", kDefaultTheta),
               compress_theta = ReadTheta(json, "compress_rope_theta", 160000);
  RopeSpec main, compress;
  if (given.Has(kMain) && given.Has(kCompress)) {
    main = read(given.Object(kMain), theta);
    compress = read(given.Object(kCompress), compress_theta);
  } else {
    Json scaling = given.Value();
    for (const char* other : {kMain, kCompress, "rope_theta", kPartial}) scaling.erase(other);
    if (!scaling.contains(kFactor)) scaling[kFactor] = 1.0;  // of YaRN
    main = read(JsonObject(none, json.File()), theta);
    compress = read(JsonObject(scaling, json.File()), compress_theta);
  }
  config.compression.rotary_dim = compress.rotary_dim;
  if (main.rotary_dim != compress.rotary_dim) json.Fail(key, "the same partial_rotary_factor in both ropes");
  for (size_t i = 0; i < kinds.size(); ++i) config.layer_specs[i].rope = kinds[i] == Entries::kNone ? main : compress;
}

void ReadHyperConnections(const JsonObject& json, ModelConfig& config) {
  HyperConnectionConfig& hyper = config.hyper_connections;
  hyper.streams = static_cast<int>(json.Int("hc_mult", 1, kernels::kMaxStreams));
  hyper.sinkhorn_iterations = static_cast<int>(json.Int("hc_sinkhorn_iters", 1, 1000));
  hyper.eps = static_cast<float>(json.Number("hc_eps", 0, 1));
}

// The first layers' experts are those of each token.
void ReadV4Experts(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kTypes = "mlp_layer_types";
  kernels::MoeConfig& moe = config.moe;
  ReadExpertCounts(json, "n_routed_experts", "moe_intermediate_size", config);
  if (json.String("scoring_func", "sqrtsoftplus") != "sqrtsoftplus") json.Fail("scoring_func", "sqrtsoftplus");
  if (!json.BoolOrNull("norm_topk_prob", true)) json.Fail("norm_topk_prob", "true");
  if (json.Int("n_shared_experts", 1, kMaxExperts, 1) != 1) json.Fail("n_shared_experts", "1");
  moe.shared_expert_intermediate_size = moe.moe_intermediate_size;
  moe.scoring_func = kernels::ScoringFunc::kSqrtSoftplus;
  moe.has_correction_bias = moe.norm_topk_prob = true;
  moe.routed_scaling_factor = static_cast<float>(json.Number("routed_scaling_factor", 0, 1e6, 1.5));
  moe.limits_gate = true;
  const auto limit = static_cast<float>(json.Number("swiglu_limit", 1e-3, 1e6, 10));
  const int64_t hashed = json.Int("num_hash_layers", 0, 1 << 20, 3);
  const Json* types = json.Find(kTypes);
  const auto is_type = [](const Json& type) { return type == "hash_moe" || type == "moe"; };
  if (types != nullptr &&
      (!types->is_array() || types->size() < config.layer_specs.size() || !std::ranges::all_of(*types, is_type))) {
    json.Fail(kTypes, fmt::format("'hash_moe' or 'moe' for each of {} layers", config.layers));
  }
  for (size_t i = 0; i < config.layer_specs.size(); ++i) {
    LayerSpec& layer = config.layer_specs[i];
    layer.moe = true;
    layer.hash_moe = types != nullptr ? (*types)[i] == "hash_moe" : static_cast<int64_t>(i) < hashed;
    layer.mlp_limit = layer.expert_limit = limit;
  }
}

void ReadDeepseekV4(const JsonObject& json, ModelConfig& config) {
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (json.BoolOrNull(key, false)) json.Fail(key, "false");
  }
  ReadSharedKv(json, config);
  const std::vector<Entries> kinds = ReadKinds(json, config.layers);
  ReadV4Ropes(json, kinds, config);
  const int chosen = ReadRate(json, "compress_rate_csa", kSparse, 4),
            all = ReadRate(json, "compress_rate_hca", kHeavy, 128);
  for (size_t i = 0; i < kinds.size(); ++i) {
    LayerSpec& layer = config.layer_specs[i];
    if (kinds[i] == Entries::kNone) continue;
    layer.row_tokens = kinds[i] == Entries::kChosen ? chosen : all;
    if (kinds[i] == Entries::kChosen) layer.selection = TokenSelection::kIndexer;
  }
  if (std::ranges::find(kinds, Entries::kChosen) != kinds.end()) ReadEntryIndexer(json, config);
  ReadHyperConnections(json, config);
  ReadV4Experts(json, config);
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  TensorNames& names = config.names;
  // As transformers saves it, and as published.
  names.decoders = {{.prefix = "model.", .lm_head = "head"}, {.prefix = "", .lm_head = "head", .embedding = "embed"}};
  names.attention = "attn";
  names.attention_out = "wo_b";
  names.pre_attention_norm = "attn_norm";
  names.pre_mlp_norm = "ffn_norm";
  names.mlp = "ffn";
  names.gate = "w1";
  names.up = "w3";
  names.down = "w2";
  names.correction_bias = "gate.bias";
}

constexpr std::string_view kDeepseekV4Defaults = R"({"vocab_size": 129280, "hidden_size": 4096,
  "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1,
  "head_dim": 512, "q_lora_rank": 1024, "num_experts_per_tok": 6, "n_routed_experts": 256,
  "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "sliding_window": 128,
  "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
  "bos_token_id": 0, "eos_token_id": 1})";

}  // namespace

extern const Architecture kDeepseekV4 = {.name = "DeepseekV4ForCausalLM",
                                         .model_type = "deepseek_v4",
                                         .read_config = ReadDeepseekV4,
                                         .defaults = kDeepseekV4Defaults,
                                         .reads_rope = true,
                                         .rename_keys = RenameV4Keys};

}  // namespace kvanta::models
